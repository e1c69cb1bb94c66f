# SPDX-License-Identifier: Apache-2.0
"""Which exporter writes a folder: it holds a lock for as long as it runs, and a file has its pid.

The kernel lets go of the lock when the process ends, however it ends. `pause` and `resume` may be
root's, and the files are an ordinary user's: a signal goes to a process of that very user alone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from gpulock.errors import BROKEN, Refusal
from gpulock.node.procfs import Proc
from gpulock.store import atomic

NAME = "pid"
LOCK = "lock"  # a file of its own: filelock before 3.30 empties what it opens
PATIENCE = 0.25  # seconds; a process that asks whether one runs holds the lock for an instant
PAUSE = 0.05
INIT = 1


class NotRunningError(ProcessLookupError):
    """Say that no exporter writes a folder."""


@contextmanager
def hold_exporter_folder(folder: str) -> Generator[None]:
    """Be the exporter that writes `folder`; raise Refusal where another one is, or OSError.

    The files themselves stay.
    """
    lock = FileLock(f"{folder}/{LOCK}", PATIENCE, 0o644)
    try:
        lock.acquire()
    except Timeout:
        raise Refusal(
            BROKEN,
            f"another gpulock-exporter writes {folder}",
            "give this one a folder of its own (EXPORTER_DIR)",
        ) from None
    try:
        atomic.replace_file(f"{folder}/{NAME}", f"{os.getpid()}\n".encode())
        yield
    finally:
        lock.release()


def signal_exporter(folder: str, number: signal.Signals) -> int:
    """Send a signal to the exporter that writes `folder`, return its pid.

    Raises NotRunningError, or OSError.
    """
    try:
        if not is_locked(f"{folder}/{LOCK}"):
            raise NotRunningError(folder)
        fd = os.open(f"{folder}/{NAME}", atomic.OPEN_READ)
    except FileNotFoundError:
        raise NotRunningError(folder) from None
    try:
        info = os.fstat(fd)
        text = os.read(fd, 32).strip() if stat.S_ISREG(info.st_mode) else b""
    finally:
        os.close(fd)
    if not text.isdigit() or int(text) <= INIT:
        raise NotRunningError(folder)
    signal_user_process(int(text), info.st_uid, number)
    return int(text)


def is_locked(path: str) -> bool:
    """Return whether a process holds the lock on a file; raise OSError.

    Not by filelock: it makes a file that is not there, which would be root's, and must be allowed
    to write the one that is.
    """
    fd = os.open(path, atomic.OPEN_READ)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def signal_user_process(pid: int, uid: int, number: signal.Signals) -> None:
    """Send a signal to a process where it is a user's own; raise NotRunningError, or OSError."""
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
