# SPDX-License-Identifier: Apache-2.0
"""One gpulockd a node: an flock on LOCK_DIR/daemon, which holds the pid for people.

Root's alone, as the gate is. The kernel lets go of it when its holder dies. Where LOCK_DIR was
removed and made again, the lock is taken again.
"""

from __future__ import annotations

import fcntl
import os
import stat

from gpulock.errors import BROKEN, BUSY, Refusal
from gpulock.store import atomic

NAME = "daemon"
PID_BYTES = 32


class InstanceLock:
    """The right to be this node's gpulockd; `take` it before every reconcile."""

    def __init__(self) -> None:
        self._fd = -1
        self._file = (0, 0)

    def take(self, lock_dir: str) -> None:
        """Take the lock, or keep it; raise Refusal: BUSY where another gpulockd runs."""
        path = f"{lock_dir}/{NAME}"
        if self._fd >= 0 and self._is(path):
            return
        fd = open_instance_lock(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            who = os.pread(fd, PID_BYTES, 0).decode("ascii", "replace").strip() or "?"
            os.close(fd)
            raise Refusal(BUSY, f"gpulockd runs already, pid {who}", "stop that one") from fault
        self.release()
        info = os.fstat(fd)
        self._fd, self._file = fd, (info.st_dev, info.st_ino)
        try:
            os.ftruncate(fd, 0)
            atomic.write_descriptor(fd, f"{os.getpid()}\n".encode())
        except OSError:
            return  # no room: nobody reads the pid but people

    def release(self) -> None:
        """Let another one run."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is(self, path: str) -> bool:
        """Return whether the file we hold is still the one at `path`."""
        try:
            named = os.lstat(path)
        except OSError:
            return False
        return self._file == (named.st_dev, named.st_ino)


def open_instance_lock(path: str) -> int:
    """Open the file of the lock; raise Refusal(BROKEN) for one that is not private."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as fault:
        raise Refusal(BROKEN, f"{path}: {fault.strerror}", "look at LOCK_DIR") from fault
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        os.close(fd)
        raise Refusal(BROKEN, f"{path} is not a private file of uid {os.geteuid()}", "remove it")
    return fd
