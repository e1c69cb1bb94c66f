# SPDX-License-Identifier: Apache-2.0
"""What gpulockd says: one line an event, and of a state that lasts one line when it begins.

The journal takes the level from `<N>` before the line (sd-daemon(3)). Elsewhere the lines go to
stderr and to syslog. The service manager learns how gpulockd fares by sd_notify(3): one datagram
a message, none without a NOTIFY_SOCKET. What cannot be written or sent stops nobody.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping

from gpulock.errors import Refusal, one_line
from gpulock.system_log import ERROR, INFO, NOTICE, WARNING, log_to_system

__all__ = ["ERROR", "INFO", "NOTICE", "WARNING", "DaemonJournal"]
WHO = "gpulockd"
LENGTH = 600  # characters of a line
QUIET = 30.0  # seconds between two texts of what lasts
DIGITS = re.compile("[0-9]+")
Said = tuple[str, float]  # a text, and when that was said


class DaemonJournal:
    """Lines go to `fd`; with `levels` they have one, without they go to syslog as well.

    `quiet`: not to syslog, of which a simulated node has none.
    """

    def __init__(
        self, fd: int = 2, levels: bool = False, quiet: bool = False, who: str = WHO
    ) -> None:
        self._fd, self._who = fd, who
        self._levels = levels
        self.quiet = quiet
        self._standing: dict[str, dict[str, Said]] = {}

    def say(self, level: int, text: str) -> None:
        """Say one line."""
        line = one_line(text)[:LENGTH]
        shown = f"<{level}>{line}\n" if self._levels else f"{self._who}: {line}\n"
        try:
            os.write(self._fd, shown.encode("utf-8", "backslashreplace"))
        except OSError:
            pass
        if not self._levels and not self.quiet:
            log_to_system(level, line, WHO)

    def log_changes(self, part: str, standing: Mapping[str, str], level: int = WARNING) -> None:
        """Say what of `standing` is new; the rest was said when it began.

        `standing` is all that is so now in that part, by a key that stays the same while it lasts.
        Another text of an error is said, once in QUIET seconds; another number in it is none. Why a
        lock is in doubt may go to and fro while slurmctld is silent.
        """
        known, now, stands = self._standing.get(part, {}), time.monotonic(), dict[str, Said]()
        for key, text in standing.items():
            said, at = known.get(key, ("", -QUIET))
            other = level == ERROR and DIGITS.sub("", text) != DIGITS.sub("", said)
            if key not in known or (other and now - at >= QUIET):
                self.say(level, text)
                said, at = text, now
            stands[key] = said, at
        for key, (said, _) in known.items():
            if key not in standing:
                self.say(INFO, f"no longer: {said}")
        self._standing[part] = stands

    def log_state(self, part: str, text: str, level: int = WARNING) -> None:
        """Say the one thing that stands now in a part; nothing where it is over."""
        self.log_changes(part, {part: text} if text else {}, level)


def run_each(parts: Iterable[tuple[str, Callable[[], object]]]) -> dict[str, str]:
    """Run parts, one after another, and return what failed: one that fails stops no other."""
    failed: dict[str, str] = {}
    for name, part in parts:
        try:
            part()
        except Exception as fault:
            kind = fault.kind if isinstance(fault, Refusal) else type(fault).__name__
            failed[f"{name} {kind}"] = describe_exception(name, fault)
    return failed


def describe_exception(what: str, fault: Exception) -> str:
    """Return what failed, and where; of a refusal why, and what to do."""
    if isinstance(fault, Refusal):
        return f"{fault.why}; {fault.do}"
    trace, place = fault.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{what} failed: {type(fault).__name__}: {fault}{place}"


STATUS_LENGTH = 200  # characters that `systemctl status` is given
MICRO = 1_000_000


class SystemdNotifier:
    """The service manager's socket at `address`; `watchdog` is its limit in seconds, 0: none.

    It is told that we live three times within the limit: `due` is when next, by the caller's clock.
    """

    def __init__(self, address: str = "", watchdog: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog = watchdog
        self.due = 0.0 if watchdog else float("inf")

    def send(self, *lines: str) -> None:
        """Send one message; a manager that does not listen is not waited for."""
        if not self._address:
            return
        flags = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        try:
            with socket.socket(socket.AF_UNIX, flags) as to:
                text = "\n".join(line[:STATUS_LENGTH] for line in lines)
                to.sendto(text.encode("utf-8", "replace"), self._address)
        except OSError:
            return

    def ready(self, status: str) -> None:
        """Say that the start, or a reload, is over."""
        self.send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Say that the settings are being read again; systemd 253 wants to know since when."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def alive(self, now: float) -> None:
        """Ping the watchdog at `now` (seconds)."""
        self.due = now + self.watchdog / 3
        self.send("WATCHDOG=1")


def notifier_from_environ(environ: Mapping[str, str], pid: int) -> SystemdNotifier:
    """Return what the service manager asks of process `pid` (sd_watchdog_enabled(3))."""
    limit = environ.get("WATCHDOG_USEC", "")
    ours = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
    seconds = int(limit) / MICRO if ours and limit.isascii() and limit.isdigit() else 0.0
    return SystemdNotifier(environ.get("NOTIFY_SOCKET", ""), seconds)


def is_journal_stream(environ: Mapping[str, str], fd: int = 2) -> bool:
    """Return whether `fd` goes to the journal (systemd.exec(5), JOURNAL_STREAM)."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        info = os.fstat(fd)
    except OSError:
        return False
    return (device, inode) == (str(info.st_dev), str(info.st_ino))
