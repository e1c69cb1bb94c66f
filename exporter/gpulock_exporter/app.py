# SPDX-License-Identifier: Apache-2.0
"""The program gpulock-exporter: options, threads, signals.

SIGUSR1 lets go of the driver, so that a GPU can be reset; SIGUSR2 takes it up again, and so does
the end of PAUSE_MAX. `gpulock-exporter pause` and `resume` send them to the one that runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from gpulock import atomic
from gpulock.node import Node
from gpulock.refusal import Refusal
from gpulock.sample import DEFAULT_DIR
from gpulock.settings import DEFAULT_PATH, load
from gpulock_exporter.clock import SystemClock
from gpulock_exporter.collectors.labels import LabelUser
from gpulock_exporter.exporter import Exporter
from gpulock_exporter.listen import ListenError, listen, parse_address
from gpulock_exporter.listen_activation import activated_sockets
from gpulock_exporter.server import Server
from gpulock_exporter.supervisor import Supervisor
from gpulock_exporter.webconfig_files import WebConfigError
from gpulock_exporter.webconfig_reload import Reloader

PERIOD, PROCESS_PERIOD = 1.0, 10.0  # seconds between two looks, and two looks at process lists
LIST_PERIOD = 10.0  # seconds between two readings of the driver's own list of cards
PAUSE_MAX = 600.0  # seconds
USAGE, BROKEN = 2, 3
PID = "pid"  # in the exporter's folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the exporter, or tell the one that runs; return the exit code."""
    options = parser().parse_args(argv)
    try:
        if options.act != "run":
            return tell(options.folder, options.act)
        return serve(options)
    except (Refusal, ListenError, WebConfigError, OSError) as fault:
        say(f"gpulock-exporter: {fault}")
        return BROKEN


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    found = argparse.ArgumentParser(
        prog="gpulock-exporter", description=(__doc__ or "").partition("\n")[0]
    )
    found.add_argument("act", nargs="?", choices=("run", "pause", "resume"), default="run")
    found.add_argument("--config", default=DEFAULT_PATH, help="settings of this node")
    found.add_argument("--listen", action="append", metavar="HOST:PORT", help="default :9465")
    found.add_argument("--web-config", default="", help="TLS and users, as exporter-toolkit's")
    found.add_argument("--folder", default=DEFAULT_DIR, help="where sample and others are written")
    found.add_argument("--label-user", choices=[u.value for u in LabelUser], default="name")
    return found


def serve(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    node = Node(load(options.config))
    stopped = threading.Event()
    exporter = Exporter(node, SystemClock(), options.folder, LabelUser(options.label_user))
    exporter.open()
    if options.web_config:
        exporter.reloader = Reloader(options.web_config, say)
    supervisor = Supervisor(worker(node), lambda: SystemClock().now().boottime)
    settings = exporter.reloader.settings if exporter.reloader else None
    server = Server(exporter.handler(), sockets(options.listen), say, settings)
    signals(supervisor, stopped)
    threading.Thread(target=watch, args=(exporter, stopped), daemon=True).start()
    atomic.replace_file(f"{options.folder}/{PID}", f"{os.getpid()}\n".encode())
    server.start()
    if exporter.reloader:
        exporter.reloader.start(server.adopt)
    try:
        run(exporter, supervisor, stopped)
    finally:
        server.stop()
        supervisor.close()
        if exporter.reloader:
            exporter.reloader.stop()
        atomic.remove_quietly(f"{options.folder}/{PID}")
    return 0


def run(exporter: Exporter, supervisor: Supervisor, stopped: threading.Event) -> None:
    """Tick once a second, at once when a frame comes."""
    due = time.monotonic()
    while not stopped.is_set():
        frames = supervisor.step(max(0.0, min(0.2, due - time.monotonic())))
        if frames or time.monotonic() >= due:
            exporter.tick(frames, supervisor)
            due = time.monotonic() + PERIOD * (1.5 if frames else 1.0)  # the next frame is earlier


def watch(exporter: Exporter, stopped: threading.Event) -> None:
    """Read the driver's list of cards now and then: it may never answer."""
    while True:
        exporter.list_devices()
        if stopped.wait(LIST_PERIOD):
            return


def worker(node: Node) -> list[str]:
    """Return how the worker is started: it speaks to NVML, or plays a simulated node."""
    marker = node.settings.simulation
    source = f"simulated:{os.path.dirname(marker)}" if marker else "nvml"
    program = [sys.executable, "-m", "gpulock_exporter.worker"]
    return [*program, str(PERIOD), str(PROCESS_PERIOD), source]


def sockets(addresses: Sequence[str] | None) -> list[socket.socket]:
    """Return what to listen on: systemd's sockets where it hands some over."""
    handed = [one for _, one in activated_sockets(os.environ)]
    return handed or listen([parse_address(one) for one in addresses or [":9465"]])


def signals(supervisor: Supervisor, stopped: threading.Event) -> None:
    """Let signals pause, resume and stop."""

    def on(number: signal.Signals, act: Callable[[], None]) -> None:
        def handle(_: int, __: FrameType | None) -> None:
            act()

        signal.signal(number, handle)

    on(signal.SIGUSR1, lambda: supervisor.pause(PAUSE_MAX))
    on(signal.SIGUSR2, supervisor.resume)
    on(signal.SIGTERM, stopped.set)
    on(signal.SIGINT, stopped.set)


def tell(folder: str, act: str) -> int:
    """Tell the exporter that runs; raise OSError where none does."""
    try:
        pid = int(atomic.read_text(f"{folder}/{PID}"))
        os.kill(pid, signal.SIGUSR1 if act == "pause" else signal.SIGUSR2)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        say(f"gpulock-exporter: none runs that writes {folder}")
        return 1
    return 0


def say(sentence: str) -> None:
    """Write one line to standard error, which is the journal."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
