# SPDX-License-Identifier: Apache-2.0
"""filelock's lock where Python is older than 3.11: filelock 3, which lends no descriptor.

Its own lock there follows a link, and empties a file that another holds. It has two methods for a
kind of lock to fill in: they are filled in here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from filelock import BaseFileLock

OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LentFileLock(BaseFileLock):
    """A flock(2) on a file; `acquired` is called with its descriptor and may raise."""

    acquired: Callable[[int], None]

    def _acquire(self) -> None:
        fd = os.open(self.lock_file, OPEN, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.acquired(fd)
        except BlockingIOError:
            os.close(fd)  # another holds it: the caller asks again until its time is up
        except BaseException:
            os.close(fd)
            raise
        else:
            self._context.lock_file_fd = fd

    def _release(self) -> None:
        fd, self._context.lock_file_fd = self._context.lock_file_fd, None
        if fd is not None:
            os.close(fd)


def lent_file_lock(path: str, seconds: float, acquired: Callable[[int], None]) -> LentFileLock:
    """Return a lock that waits `seconds` at most."""
    lock = LentFileLock(path, seconds, 0o600)
    lock.acquired = acquired
    return lock
