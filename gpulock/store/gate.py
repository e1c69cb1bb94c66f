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
FOREVER = float("inf")
FIRST_PAUSE = 0.0005  # seconds; a claim takes less than that on tmpfs
LONGEST_PAUSE = 0.02  # seconds


class Gate:
    """Hold the gate of `lock_dir` for the length of a `with` block; `name` is its file.

    Raises LockTimeout when it stays shut until the deadline, or for `seconds`; Refusal(BROKEN) when
    the file is not ours. `waited` is the time spent in seconds.
    """

    __slots__ = ("_deadline", "_fd", "_path", "waited")

    def __init__(
        self, lock_dir: str, deadline: Deadline, seconds: float = FOREVER, name: str = NAME
    ) -> None:
        self._path = f"{lock_dir}/{name}"
        self._deadline = Deadline(min(deadline.left(), seconds)) if seconds < FOREVER else deadline
        self._fd = -1
        self.waited = 0.0

    def __enter__(self) -> "Gate":
        begun = clock_boottime()
        while not self._take():
            pass  # the file was removed, or another one is in its place: take that
        self.waited = clock_boottime() - begun
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.close(self._fd)
        except OSError:
            return  # Linux lets go of the descriptor, and so of the lock, whatever close(2) says

    def _take(self) -> bool:
        """Lock the file; return whether it still is the one of that name by then."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = self._fd = os.open(self._path, flags, 0o600)
        except OSError as fault:
            raise self._broken("opened", fault) from fault
        pause = FIRST_PAUSE
        try:
            ours, uid = os.fstat(fd), os.geteuid()
            if not stat.S_ISREG(ours.st_mode) or ours.st_uid != uid or ours.st_mode & 0o077:
                why = f"{self._path} is not a private file of uid {uid}"
                raise Refusal(BROKEN, why, "remove it when no hook is running")
            while True:
                left = self._deadline.left()  # asked first: one that was held up tries once more
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as fault:
                    if fault.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                        raise self._broken("locked", fault) from fault
                if left <= 0:
                    raise LockTimeout(self._path)
                time.sleep(min(pause, left))
                pause = min(pause * 2, LONGEST_PAUSE)
            named = os.lstat(self._path)
            if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino):
                return True
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return False

    def _broken(self, what: str, fault: OSError) -> Refusal:
        folder = self._path.rpartition("/")[0]
        return Refusal(
            BROKEN, f"{self._path} cannot be {what}: {fault.strerror}", f"look at {folder}"
        )
