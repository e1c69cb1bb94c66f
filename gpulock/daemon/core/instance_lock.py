# SPDX-License-Identifier: Apache-2.0
"""One at a time: one gpulockd a node, and one author of the history (flock(2), through filelock).

The kernel frees such a lock when its holder dies. The file stays: without it two could hold two
files of one name. A link is not followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpulock.errors import BROKEN, BUSY, Refusal
from gpulock.store import atomic

if TYPE_CHECKING:
    from filelock import BaseFileLock

NAME = "daemon"  # in LOCK_DIR; it holds the pid for people
PID_BYTES = 32
POLL = 0.02  # seconds between two tries


def private_file_lock(
    path: str, seconds: float, acquired: Callable[[int], None] | None = None
) -> BaseFileLock:
    """Return a lock on a file that only this uid may open: who else may could block us.

    Taking it calls `acquired` with the descriptor. It raises OSError (filelock.Timeout, a
    TimeoutError, where another holds it for `seconds`) or Refusal(BROKEN) for another's file.
    """
    import filelock  # 8 MiB and 60 ms, which readers of the history spare

    def check(fd: int) -> None:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise Refusal(
                BROKEN, f"{path} is not a private file of uid {os.geteuid()}", "remove it"
            )
        if acquired is not None:
            acquired(fd)

    if filelock.__version__.startswith("3."):
        from gpulock.daemon.core.older_filelock import lent_file_lock

        return lent_file_lock(path, seconds, check)
    # without flock(2) it would fall back to a file that outlives its holder
    return filelock.FileLock(
        path, seconds, 0o600, poll_interval=POLL, fallback_to_soft=False, on_acquired=check
    )


def find_running_daemon(lock_dir: str, proc_root: str) -> int | None:
    """Return the pid of the gpulockd that has this node's lock open; None where none is seen.

    The file outlives its holder, and its pid may be another process's by now. One whose open files
    may not be seen is believed: in a container root may lack that right.
    """
    path = f"{lock_dir}/{NAME}"
    try:
        pid = int(atomic.read_text(path, PID_BYTES))
        file, folder = os.stat(path), f"{proc_root}/{pid}/fd"
    except (OSError, ValueError):
        return None
    try:
        return pid if _has_open(folder, file) else None
    except PermissionError:
        return pid
    except OSError:
        return None


def _has_open(folder: str, file: os.stat_result) -> bool:
    """Return whether a folder of descriptors, in /proc, has one of a file; raise OSError."""
    for fd in os.listdir(folder):
        try:
            if os.path.samestat(file, os.stat(f"{folder}/{fd}")):
                return True
        except FileNotFoundError:
            continue  # closed meanwhile
    return False


class AlreadyRunningError(Refusal):
    """Refuse to go on: another gpulockd is this node's."""


class InstanceLock:
    """The right to be this node's gpulockd; `take` it before every reconcile.

    Where LOCK_DIR was removed and made again, it is taken again.
    """

    def __init__(self) -> None:
        self._lock: BaseFileLock | None = None
        self._file = (0, 0)

    def take(self, lock_dir: str) -> None:
        """Take the lock, or keep it; raise Refusal, AlreadyRunningError where another runs."""
        path = f"{lock_dir}/{NAME}"
        if self._lock is not None:
            try:
                named = os.lstat(path)
            except OSError:
                named = None
            if named is not None and self._file == (named.st_dev, named.st_ino):
                return
        self.release()  # of a file that is gone
        lock = private_file_lock(path, 0.0, self._write_pid)
        try:
            lock.acquire()  # pyright: ignore[reportUnknownMemberType] (its types are of 3.11)
        except TimeoutError as fault:
            try:
                who = atomic.read_text(path, PID_BYTES).strip()
            except OSError:
                who = ""
            raise AlreadyRunningError(
                BUSY, f"gpulockd runs already, pid {who or '?'}", "stop that one"
            ) from fault
        except OSError as fault:
            raise Refusal(BROKEN, f"{path}: {fault.strerror}", "look at LOCK_DIR") from fault
        self._lock = lock

    def _write_pid(self, fd: int) -> None:
        """Note which file we hold, and for people who we are; no room for that stops nobody."""
        info = os.fstat(fd)
        self._file = (info.st_dev, info.st_ino)
        try:
            os.ftruncate(fd, 0)
            atomic.write_descriptor(fd, f"{os.getpid()}\n".encode())
        except OSError:
            return

    def release(self) -> None:
        """Let another one run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
