# SPDX-License-Identifier: Apache-2.0
"""The program gpulock-exporter: options, threads, signals.

What it does is set in gpulock.conf; an option of the program counts before its key there.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

import gpulock
from gpulock.daemon.core.journal import notifier_from_environ
from gpulock.daemon.core.own_program import module_command
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.node.settings_file import DEFAULT_PATH, read_settings
from gpulock_exporter.app.exporter import Exporter
from gpulock_exporter.state.snapshot import current_moment
from gpulock_exporter.web.listen import ListenError, Listening
from gpulock_exporter.web.server import HttpServer, WebSettings
from gpulock_exporter.web.webconfig import WebConfigError, load_web_config
from gpulock_exporter.worker.supervisor import Supervisor, WorkerTimeouts

TICK = 1.0  # seconds between two looks at the locks, and at most between two samples written
OBSERVED = 16.0  # seconds that the driver's buffer of samples holds
LATE_FRAME = 4.0  # seconds beyond SAMPLE_PERIOD, at most, after which the driver is taken to hang
RETRY = 5.0  # seconds between two tries to listen
ACCEPT_SECONDS = 5.0  # seconds for the thread that accepts connections, on a node that is busy
AT_FAULT = 3  # exit code; 2 is argparse's own


def main(argv: Sequence[str] | None = None) -> int:
    """Run the exporter; return the exit code."""
    options = exporter_parser().parse_args(argv)
    faulthandler.enable(2)  # the watchdog's SIGABRT writes to the journal where it hung
    try:
        settings = apply_exporter_options(read_settings(options.config), options)
        for wrong in settings.faults:
            write_stderr_line(f"gpulock-exporter: {wrong}; correct the file")
        if settings.sample_period > OBSERVED:
            write_stderr_line(
                f"gpulock-exporter: SAMPLE_PERIOD is {settings.sample_period:g}, and the driver "
                f"keeps {OBSERVED:g} s of samples: the rest is not observed; make it less"
            )
        return serve_exporter(settings)
    except Refusal as fault:
        write_stderr_line(f"gpulock-exporter: {fault.why}; {fault.do}")
        return AT_FAULT
    except (ListenError, WebConfigError, OSError) as fault:
        write_stderr_line(f"gpulock-exporter: {fault}")
        return AT_FAULT


def exporter_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="gpulock-exporter",
        description="Serve what each GPU does and which job holds it, for Prometheus and people.",
    )
    version = f"%(prog)s {gpulock.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--config", default=DEFAULT_PATH, help="settings of this node")
    listen = "in place of EXPORTER_LISTEN"
    parser.add_argument("--listen", action="append", metavar="HOST:PORT", help=listen)
    folder = "in place of LOCK_DIR-exporter"
    parser.add_argument("--folder", type=os.path.abspath, metavar="DIR", help=folder)
    return parser


def apply_exporter_options(settings: Settings, options: argparse.Namespace) -> Settings:
    """Return the settings with the options that were given in place of their keys."""
    if options.listen:
        settings.exporter_listen = tuple(options.listen)
    if options.folder:
        settings.exporter_dir = options.folder
    return settings


def serve_exporter(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    exporter = Exporter(Node(settings), current_moment, write_stderr_line)
    try:
        exporter.folder.hold()
        exporter.open()
        return serve_exporter_folder(settings, exporter)
    finally:
        exporter.folder.release()


def serve_exporter_folder(settings: Settings, exporter: Exporter) -> int:
    """Serve as the only exporter that writes this folder."""
    stopped = install_signal_handlers()
    web = WebSettings()
    if settings.web_config:
        web, warning = load_web_config(settings.web_config)
        if warning:
            write_stderr_line(f"{settings.web_config}: {warning}")
    # the next worker shall be heard before the values of the last one are too old to be told
    late = min(LATE_FRAME, settings.max_sample_age / 2)
    limits = WorkerTimeouts(frame=settings.sample_period + late)
    supervisor = Supervisor(worker_command(settings), clock_boottime, limits)
    listening = Listening(settings.exporter_listen, os.environ)
    server = HttpServer(exporter.handler(), listening.open(), write_stderr_line, web)
    server.start()
    systemd = notifier_from_environ(os.environ, os.getpid())
    try:
        due, retry, words = time.monotonic(), 0.0, ""
        while not stopped.is_set() and server.is_serving:
            if time.monotonic() >= retry:
                retry = time.monotonic() + RETRY
                server.listen(listening.open())
                if listening.words(RETRY) != words:
                    words = listening.words(RETRY)
                    write_stderr_line(f"gpulock-exporter {gpulock.__version__} {words}")
                    systemd.ready(words)
            if time.monotonic() >= systemd.due and server.answers(ACCEPT_SECONDS):
                systemd.alive(time.monotonic())
            # once a second, and at once when a frame comes
            frames = supervisor.step(max(0.0, due - time.monotonic()))
            if frames or time.monotonic() >= due:
                exporter.tick(frames, supervisor)
                due = time.monotonic() + TICK * (1.5 if frames else 1.0)  # the next frame is due
                # gone, and not to be made by this user: the service manager makes it
                if systemd.watchdog and not os.path.isdir(settings.exporter_dir):
                    write_stderr_line(f"gpulock-exporter: {settings.exporter_dir} is gone")
                    return AT_FAULT
    finally:
        serving = server.is_serving
        server.stop()
        supervisor.close()
    return 0 if serving else AT_FAULT


def worker_command(settings: Settings) -> list[str]:
    """Return how the worker is started: it speaks to NVML, or plays a simulated node."""
    marker = settings.simulation
    source = f"simulated:{os.path.dirname(marker)}" if marker else "nvml"
    program = module_command("gpulock_exporter.worker.process")
    return [*program, str(settings.sample_period), str(settings.process_period), source]


def install_signal_handlers() -> threading.Event:
    """Return what signals set to stop; a hang-up ends only what a terminal runs."""
    stopped = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, stop if sys.stderr.isatty() else signal.SIG_IGN)
    return stopped


def write_stderr_line(sentence: str) -> None:
    """Write one line to standard error, which is the journal."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
