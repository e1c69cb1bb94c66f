# SPDX-License-Identifier: Apache-2.0
"""Tell the service manager that the exporter is at work; one that hangs it ends and starts anew.

A thread of its own looks at the others. A tick that hangs in the driver does not stop the pings:
no signal ends a process that the kernel holds, and scrapes report the fault meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, MutableMapping

from gpulock.daemon.core.journal import SystemdNotifier, notifier_from_environ
from gpulock.node.procfs import Proc, parse_stat

OFTEN = 3  # times within its limit that the manager is told
HELD = "D"  # the state of a thread that sleeps in the kernel and cannot be woken, proc_pid_stat(5)
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Heartbeat:
    """When a thread went round last."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = Proc(proc)
        self._thread = str(threading.get_native_id())
        self._at = time.monotonic()

    def beat(self) -> None:
        """Go round; called by that thread alone."""
        self._at = time.monotonic()

    def goes_on(self, seconds: float) -> bool:
        """Return whether it went round so lately, or the kernel holds it and nothing can help."""
        if time.monotonic() - self._at <= seconds:
            return True
        stat = self._proc.read(os.getpid(), f"task/{self._thread}/stat")
        return parse_stat(stat).state == HELD


def take_notifier(environ: MutableMapping[str, str], pid: int) -> SystemdNotifier:
    """Return who started process `pid` and wants to hear of it.

    The variables are removed, so that no child takes them for its own.
    """
    found = notifier_from_environ(environ, pid)
    for name in VARIABLES:
        environ.pop(name, None)
    return found


def start_watchdog(manager: SystemdNotifier, is_well: Callable[[], bool]) -> None:
    """Say again and again that we live, as long as that is so, from a thread of its own."""

    def run() -> None:
        while True:
            if is_well():
                manager.send("WATCHDOG=1")
            time.sleep(manager.watchdog / OFTEN)

    if manager.watchdog:
        threading.Thread(target=run, name="watchdog", daemon=True).start()
