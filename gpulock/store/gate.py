# SPDX-License-Identifier: Apache-2.0
"""The gate: the one door to the lock directory, an flock on a file that is never deleted.

Hot, stdlib flock: the kernel lets go of it when its holder dies, so there is no stale gate. The
file is 0600, since a user who may open it can block the node (facts/locking.md). It is polled up to
a deadline, because a blocked flock cannot be timed without a signal.
"""

import errno
import fcntl
import os
import stat
import time

from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, LockTimeout, Refusal

NAME = "gate"
FIRST_PAUSE = 0.0005  # seconds; a claim takes less than that on tmpfs
LONGEST_PAUSE = 0.02  # seconds


class Gate:
    """Hold the gate of `lock_dir` for the length of a `with` block; `name` is its file.

    Raises LockTimeout when it stays shut until the deadline, Refusal(BROKEN) when the gate
    file is not ours. `waited` is the time spent in seconds.
    """

    __slots__ = ("_deadline", "_fd", "_file", "_path", "waited")

    def __init__(self, lock_dir: str, deadline: Deadline, name: str = NAME) -> None:
        self._path = f"{lock_dir}/{name}"
        self._deadline = deadline
        self._fd = -1
        self._file = (0, 0)
        self.waited = 0.0

    def __enter__(self) -> "Gate":
        begun = clock_boottime()
        while True:
            self._fd = self._open()
            try:
                self._lock()
                named = os.lstat(self._path)
                if self._file == (named.st_dev, named.st_ino):
                    self.waited = clock_boottime() - begun
                    return self
            except FileNotFoundError:
                pass  # removed: make it again
            except BaseException:
                os.close(self._fd)
                raise
            os.close(self._fd)  # somebody put another file in its place: take that one

    def __exit__(self, *_: object) -> None:
        try:
            os.close(self._fd)
        except OSError:
            return  # Linux lets go of the descriptor, and so of the lock, whatever close(2) says

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags, 0o600)
        except OSError as fault:
            raise Refusal(
                BROKEN, f"the gate cannot be opened: {fault}", "look at LOCK_DIR"
            ) from fault
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            os.close(fd)
            raise Refusal(
                BROKEN,
                f"{self._path} is not a private file of uid {os.geteuid()}",
                "remove it when no hook is running",
            )
        self._file = (info.st_dev, info.st_ino)
        return fd

    def _lock(self) -> None:
        pause = FIRST_PAUSE
        while True:
            left = self._deadline.left()  # asked first: who was held up himself tries once more
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as fault:
                if fault.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    raise Refusal(
                        BROKEN, f"the gate cannot be locked: {fault}", "look at LOCK_DIR"
                    ) from fault
            if left <= 0:
                raise LockTimeout(self._path)
            time.sleep(min(pause, left))
            pause = min(pause * 2, LONGEST_PAUSE)
