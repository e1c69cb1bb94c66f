# SPDX-License-Identifier: Apache-2.0
"""Which exporter writes a folder: a file with its pid, locked for as long as it runs.

The kernel lets go of the lock when the process ends, however it ends. `pause` and `resume` may be
root's, and the file is an ordinary user's: a signal goes to a process of that very user alone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from types import TracebackType

from gpulock.errors import BROKEN, Refusal
from gpulock.node.procfs import Proc
from gpulock.store import atomic

NAME = "pid"
MODE = 0o644
TRIES, PAUSE = 5, 0.05  # seconds; whoever asks whether one runs holds the lock for an instant
INIT = 1


class NotRunningError(ProcessLookupError):
    """Say that no exporter writes a folder."""


class PidFile:
    """The mark of the exporter that writes `folder`, as a context; the file itself stays."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._fd = -1

    def __enter__(self) -> PidFile:
        """Take the folder; raise Refusal where another exporter has it, or OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(f"{self._folder}/{NAME}", flags, MODE)
        for attempt in range(TRIES):
            if try_flock(fd, fcntl.LOCK_EX):
                break
            if attempt == TRIES - 1:
                os.close(fd)
                raise Refusal(
                    BROKEN,
                    f"another gpulock-exporter writes {self._folder}",
                    "give this one a folder of its own (EXPORTER_DIR)",
                )
            time.sleep(PAUSE)
        os.ftruncate(fd, 0)
        atomic.write_descriptor(fd, f"{os.getpid()}\n".encode())
        self._fd = fd
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)


def signal_exporter(folder: str, number: signal.Signals) -> int:
    """Send a signal to the exporter that writes `folder`, return its pid.

    Raises NobodyError, or OSError.
    """
    path = f"{folder}/{NAME}"
    try:
        fd = os.open(path, atomic.OPEN_READ)
    except FileNotFoundError:
        raise NotRunningError(path) from None
    try:
        info = os.fstat(fd)
        text = os.read(fd, 32).strip() if stat.S_ISREG(info.st_mode) else b""
        if try_flock(fd, fcntl.LOCK_SH) or not text.isdigit() or int(text) <= INIT:
            raise NotRunningError(path)
        signal_user_process(int(text), info.st_uid, number)
        return int(text)
    finally:
        os.close(fd)


def wait_for_worker_exit(pid: int, seconds: float) -> int:
    """Wait until an exporter has no worker; return the pid of one that is still there, or 0."""
    end = time.monotonic() + seconds
    while left := find_exporter_worker(pid):
        if time.monotonic() >= end:
            break
        time.sleep(PAUSE)
    return left


def find_exporter_worker(pid: int) -> int:
    """Return the child of an exporter that is not over, 0 where there is none."""
    proc = Proc()
    for child in proc.pids():
        try:
            found = proc.stat(child)
            if found.ppid == pid and not proc.finished(child, found.state):
                return child
        except (OSError, ValueError):
            continue  # it is gone, or none of ours
    return 0


def signal_user_process(pid: int, uid: int, number: signal.Signals) -> None:
    """Send a signal to a process where it is a user's own; raise NobodyError, or OSError."""
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):
        raise NotRunningError(f"process {pid}") from None
    try:
        if os.stat(f"/proc/{pid}").st_uid != uid:  # the handle keeps it from being a later one
            raise NotRunningError(f"process {pid}")
        signal.pidfd_send_signal(handle, number)
    except FileNotFoundError:
        raise NotRunningError(f"process {pid}") from None
    finally:
        os.close(handle)


def try_flock(fd: int, how: int) -> bool:
    """Take a lock where nobody has it; return whether that was so."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
