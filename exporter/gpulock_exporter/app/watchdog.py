# SPDX-License-Identifier: Apache-2.0
"""Tell the service manager that the exporter is at work; one that hangs it ends and starts anew.

A thread of its own looks at the others. A tick that hangs in the driver does not stop the pings:
no signal ends a process that the kernel holds, and scrapes report the fault meanwhile. The messages
are those of sd_notify(3): one datagram each. A message that cannot be sent is dropped.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, MutableMapping

MICRO = 1_000_000
OFTEN = 3  # times within its limit that the manager is told
HELD = "D"  # the state of a thread that sleeps in the kernel and cannot be woken, proc_pid_stat(5)


class Heartbeat:
    """When a thread went round last."""

    def __init__(self, proc: str = "/proc") -> None:
        self._stat = f"{proc}/self/task/{threading.get_native_id()}/stat"
        self._at = time.monotonic()

    def beat(self) -> None:
        """Go round; called by that thread alone."""
        self._at = time.monotonic()

    def goes_on(self, seconds: float) -> bool:
        """Return whether it went round so lately, or the kernel holds it and nothing can help."""
        return time.monotonic() - self._at <= seconds or read_stat_state(self._stat) == HELD


class ServiceManager:
    """The service manager's socket at `address`; `limit` is its patience in seconds, 0: endless."""

    def __init__(self, address: str, limit: float) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.limit = limit

    def ready(self, status: str) -> None:
        """Say that the start is over, and in one line how things stand."""
        self._send(f"READY=1\nSTATUS={status}")

    def watch(self, is_well: Callable[[], bool]) -> None:
        """Say again and again that we live, as long as that is so, from a thread of its own."""
        if self.limit:
            threading.Thread(
                target=self._run, args=(is_well,), name="watchdog", daemon=True
            ).start()

    def _run(self, is_well: Callable[[], bool]) -> None:
        while True:
            if is_well():
                self._send("WATCHDOG=1")
            time.sleep(self.limit / OFTEN)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        try:
            with socket.socket(socket.AF_UNIX, kind) as to:
                to.sendto(message.encode("utf-8", "replace"), self._address)
        except OSError:
            return


def service_manager_from_env(environ: MutableMapping[str, str], pid: int) -> ServiceManager:
    """Return who started process `pid` and wants to hear of it (sd_watchdog_enabled(3)).

    The variables are removed, so that no child takes them for its own.
    """
    address, limit, meant = (
        environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    )
    ours = limit.isascii() and limit.isdigit() and meant in ("", str(pid))
    return ServiceManager(address, int(limit) / MICRO if ours else 0.0)


def read_stat_state(path: str) -> str:
    """Return the state in a stat file of the kernel's, empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            after = file.read(4096).rpartition(b") ")[2]
    except OSError:
        return ""
    return after[:1].decode("ascii", "replace")
