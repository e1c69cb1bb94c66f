# SPDX-License-Identifier: Apache-2.0
"""The program gpulock-exporter: options, threads, signals.

What it does is set in gpulock.conf; an option of the program counts before its key there. SIGUSR1
lets go of the driver, so that a GPU can be reset; SIGUSR2 takes it up again, and so does the end
of LONGEST_PAUSE. `gpulock-exporter pause` and `resume` send them to the one that runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

import gpulock
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.node.settings_file import DEFAULT_PATH, read_settings
from gpulock_exporter.app.exporter import Exporter
from gpulock_exporter.app.pidfile import (
    FolderHold,
    NotRunningError,
    is_disk_full,
    signal_exporter,
    wait_for_worker_exit,
)
from gpulock_exporter.app.sockets import listen_when_free, open_exporter_sockets
from gpulock_exporter.app.watchdog import Heartbeat, start_watchdog, take_notifier
from gpulock_exporter.clock import SystemClock
from gpulock_exporter.metrics.labels import LabelUser
from gpulock_exporter.web.listen import ListenError
from gpulock_exporter.web.server import HttpServer
from gpulock_exporter.webconfig.config import WebConfigError
from gpulock_exporter.webconfig.reload import Reloader
from gpulock_exporter.worker.child import WorkerTimeouts
from gpulock_exporter.worker.supervisor import Supervisor

TICK = 1.0  # seconds between two looks at the locks, and at most between two samples written
OBSERVED = 16.0  # seconds that the driver's buffer of samples holds
LONGEST_PAUSE = 600.0  # seconds: `gpulock reset` is over, or its author is gone
LATE_FRAME = 4.0  # seconds beyond SAMPLE_PERIOD, at most, after which the driver is taken to hang
PAUSES = (signal.SIGUSR1, signal.SIGUSR2)
HANDLED = (*PAUSES, signal.SIGHUP)  # what would end the exporter before its handler is there
HUNG_UP = "SIGHUP: WEB_CONFIG is read when it changes, and gpulock.conf at a restart"
WORKER_EXIT_SECONDS = 10.0  # seconds in which a worker that can be killed is gone
ACCEPT_SECONDS = 5.0  # seconds for the thread that accepts connections, on a node that is busy
NOT_RUNNING, AT_FAULT = 1, 3  # exit codes; 2 is argparse's own


def main(argv: Sequence[str] | None = None) -> int:
    """Run the exporter, or tell the one that runs; return the exit code."""
    options = exporter_parser().parse_args(argv)
    try:
        settings = apply_exporter_options(read_settings(options.config), options)
        for wrong in settings.faults:
            write_stderr_line(f"gpulock-exporter: {wrong}; correct the file")
        if settings.sample_period > OBSERVED:
            write_stderr_line(
                f"gpulock-exporter: SAMPLE_PERIOD is {settings.sample_period:g}, and the driver "
                f"keeps {OBSERVED:g} s of samples: the rest is not observed; make it less"
            )
        if options.act != "run":
            return request_pause_or_resume(settings.exporter_dir, options.act)
        return serve_exporter(settings)
    except Refusal as fault:
        write_stderr_line(f"gpulock-exporter: {fault.why}; {fault.do}")
        return AT_FAULT
    except (ListenError, WebConfigError, OSError) as fault:
        write_stderr_line(f"gpulock-exporter: {fault}")
        return AT_FAULT


def exporter_parser() -> argparse.ArgumentParser:
    """Return the options."""
    found = argparse.ArgumentParser(
        prog="gpulock-exporter",
        description="Serve what each GPU does and which job holds it, for Prometheus and people.",
    )
    found.add_argument(
        "act",
        nargs="?",
        choices=("run", "pause", "resume"),
        default="run",
        help="run it (the default); or make the running one release the driver, or use it again",
    )
    version = f"%(prog)s {gpulock.__version__}"
    found.add_argument("--version", action="version", version=version)
    found.add_argument("--config", default=DEFAULT_PATH, help="settings of this node")
    found.add_argument(
        "--listen", action="append", metavar="HOST:PORT", help="in place of EXPORTER_LISTEN"
    )
    found.add_argument("--web-config", metavar="FILE", help="in place of WEB_CONFIG")
    found.add_argument("--folder", metavar="DIR", help="in place of LOCK_DIR-exporter")
    found.add_argument("--label-user", choices=[u.value for u in LabelUser], help="of LABEL_USER")
    return found


def apply_exporter_options(settings: Settings, options: argparse.Namespace) -> Settings:
    """Return the settings with the options that were given in place of their keys."""
    given = {
        "exporter_listen": tuple(options.listen) if options.listen else None,
        "web_config": options.web_config,
        "exporter_dir": os.path.abspath(options.folder) if options.folder else None,
        "label_user": options.label_user,
    }
    for name, value in given.items():
        if value is not None:
            setattr(settings, name, value)
    return settings


def serve_exporter(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    hold = FolderHold(settings.exporter_dir)
    exporter = Exporter(Node(settings), SystemClock(), write_stderr_line, hold.take)
    # a signal to pause may come once the pid file shows: it waits until a handler is there
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        for prepare in (hold.take, exporter.open):
            try:
                prepare()
            except (OSError, Refusal) as fault:
                if not is_disk_full(fault):
                    raise
                write_stderr_line(f"gpulock-exporter: {fault}; metrics are served without it")
        return serve_exporter_folder(settings, exporter)
    finally:
        hold.release()


def serve_exporter_folder(settings: Settings, exporter: Exporter) -> int:
    """Serve as the only exporter that writes this folder."""
    stopped, hung_up = threading.Event(), threading.Event()
    if settings.web_config:
        exporter.reloader = Reloader(settings.web_config, write_stderr_line)
    # the next worker shall be heard before the values of the last one are too old to be told
    late = min(LATE_FRAME, settings.max_sample_age / 2)
    limits = WorkerTimeouts(frame=settings.sample_period + late)
    supervisor = Supervisor(worker_command(settings), lambda: SystemClock().now().boottime, limits)
    web = exporter.reloader.settings if exporter.reloader else None
    listeners, words = open_exporter_sockets(settings.exporter_listen)
    server = HttpServer(exporter.handler(), listeners, write_stderr_line, web)
    install_signal_handlers(supervisor, LONGEST_PAUSE, stopped, hung_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # before there is a worker to inherit it
    exporter.listed.start()
    server.start()
    pulse, systemd = Heartbeat(), take_notifier(os.environ, os.getpid())

    def announce(answers: str) -> None:
        write_stderr_line(f"gpulock-exporter {gpulock.__version__} {answers}")
        systemd.ready(answers)

    announce(words)
    if not listeners:
        listen_when_free(settings.exporter_listen, server, words, announce)
    patience = systemd.watchdog / 2
    start_watchdog(systemd, lambda: server.answers(ACCEPT_SECONDS) and pulse.goes_on(patience))
    if exporter.reloader:
        exporter.reloader.start(server.adopt)
    made = os.path.isdir(settings.exporter_dir)
    try:
        due = time.monotonic()
        while not stopped.is_set() and server.is_serving:
            pulse.beat()
            if hung_up.is_set():
                hung_up.clear()
                write_stderr_line(f"gpulock-exporter: {HUNG_UP}")
            # once a second, and at once when a frame comes
            frames = supervisor.step(max(0.0, due - time.monotonic()))
            if frames or time.monotonic() >= due:
                exporter.tick(frames, supervisor)
                due = time.monotonic() + TICK * (1.5 if frames else 1.0)  # the next frame is due
                # gone, and not to be made by this user: the service manager makes it
                if made and systemd.watchdog and not os.path.isdir(settings.exporter_dir):
                    write_stderr_line(f"gpulock-exporter: {settings.exporter_dir} is gone")
                    return AT_FAULT
    finally:
        serving = server.is_serving
        server.stop()
        supervisor.close()
        exporter.listed.stop()
        if exporter.reloader:
            exporter.reloader.stop()
    return 0 if serving else AT_FAULT


def worker_command(settings: Settings) -> list[str]:
    """Return how the worker is started: it speaks to NVML, or plays a simulated node."""
    marker = settings.simulation
    source = f"simulated:{os.path.dirname(marker)}" if marker else "nvml"
    program = [sys.executable, "-m", "gpulock_exporter.worker.process"]
    return [*program, str(settings.sample_period), str(settings.process_period), source]


def install_signal_handlers(
    supervisor: Supervisor,
    longest_pause: float,
    stopped: threading.Event,
    hung_up: threading.Event,
) -> None:
    """Let signals pause, resume and stop; a hang-up ends only what a terminal runs."""

    def on(number: signal.Signals, act: Callable[[], None]) -> None:
        def handle(_: int, __: FrameType | None) -> None:
            act()

        signal.signal(number, handle)

    def stop() -> None:
        stopped.set()
        supervisor.wake()

    def hang_up() -> None:
        (stopped if sys.stderr.isatty() else hung_up).set()
        supervisor.wake()

    on(signal.SIGHUP, hang_up)
    on(signal.SIGUSR1, lambda: supervisor.pause(longest_pause))
    on(signal.SIGUSR2, supervisor.resume)
    on(signal.SIGTERM, stop)
    on(signal.SIGINT, stop)


def request_pause_or_resume(folder: str, act: str) -> int:
    """Tell the exporter that runs to pause or resume; return the exit code; raise OSError.

    A pause is over with when the driver is let go: a reset of the GPU may be the next command.
    """
    try:
        pid = signal_exporter(folder, signal.SIGUSR1 if act == "pause" else signal.SIGUSR2)
    except NotRunningError:
        write_stderr_line(f"gpulock-exporter: none runs that writes {folder}")
        return NOT_RUNNING
    except PermissionError:
        write_stderr_line(
            f"gpulock-exporter: {act}: the one that writes {folder} is another user's; be root"
        )
        return NOT_RUNNING
    name = f"gpulock-exporter: the one that writes {folder}"
    if act == "resume":
        write_stderr_line(f"{name} will use the driver again")
        return 0
    left = wait_for_worker_exit(pid, WORKER_EXIT_SECONDS)
    if left:
        write_stderr_line(
            f"{name} is paused, but process {left} has not released the driver: it hangs in it"
        )
        return AT_FAULT
    write_stderr_line(f"{name} has released the driver")
    return 0


def write_stderr_line(sentence: str) -> None:
    """Write one line to standard error, which is the journal."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
