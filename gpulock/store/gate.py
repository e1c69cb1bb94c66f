# SPDX-License-Identifier: Apache-2.0
"""The gate: the one door to locks and records, an flock on a file that is never deleted.

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
from gpulock.errors import BROKEN, UNKNOWN, LockTimeout, Refusal, os_error_kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.store.locks import LockStore

GATE = "gate"
LONGEST_WAIT = 20.0  # seconds at the gate of a node, whatever deadline its caller has
FIRST_PAUSE = 0.0005  # seconds; a claim takes less than that on tmpfs
LONGEST_PAUSE = 0.02  # seconds


class Gate:
    """Hold the gate of a folder for the length of a `with` block; `name` is its file.

    Of a LockStore it is beside the records, and Refusal(UNKNOWN) at the end tells where the gate is
    another one by then. Raises LockTimeout when it stays shut until the deadline, or a
    LockStore's for LONGEST_WAIT; Refusal(BROKEN) when the file is not ours. `waited` is the time
    spent in seconds.
    """

    def __init__(
        self,
        of: "str | LockStore",
        deadline: Deadline,
        name: str = GATE,
    ) -> None:
        self._guarded = not isinstance(of, str)
        self._path = f"{of if isinstance(of, str) else of.root}/{name}"
        self._ours = (0, 0)
        self._checked = False
        self._deadline = deadline.sooner(LONGEST_WAIT) if self._guarded else deadline
        self._fd = -1
        self.waited = 0.0

    def __enter__(self) -> "Gate":
        begun = clock_boottime()
        while not self._take():
            pass  # the file was removed, or another one is in its place: take that
        self.waited = clock_boottime() - begun
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        try:
            if self._guarded and kind is None and not self._checked and not self.is_named():
                raise self.replaced_refusal()
        finally:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # a child before its exec has it open too
            except OSError:
                pass  # close(2) unlocks it as well
            try:
                os.close(self._fd)
            except OSError:
                pass  # Linux lets go of it, whatever close(2) says

    def is_named(self) -> bool:
        """Return whether the gate still is the one that we are in."""
        try:
            named = os.lstat(self._path)
        except OSError:
            return False
        self._checked = self._ours == (named.st_dev, named.st_ino)
        return self._checked

    def replaced_refusal(self) -> Refusal:
        """Return the refusal where they are not: what was done may be lost."""
        return Refusal(
            UNKNOWN,
            f"{self._path} was replaced meanwhile, perhaps with all records",
            "try again",
        )

    def _take(self) -> bool:
        """Lock the file; return whether it still is the one of that name by then."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = -1
        try:
            fd = self._fd = os.open(self._path, flags, 0o600)
        except OSError as fault:
            raise self._failed("opened", fault) from fault
        pause = FIRST_PAUSE
        try:
            ours, uid = os.fstat(fd), os.geteuid()
            if not stat.S_ISREG(ours.st_mode) or ours.st_uid != uid or ours.st_mode & 0o077:
                why = f"{self._path} is not a private file of uid {uid}"
                raise Refusal(BROKEN, why, "remove it when no hook is running")
            self._ours = (ours.st_dev, ours.st_ino)
            while True:
                left = self._deadline.left()  # asked first: one that was held up tries once more
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as fault:
                    if fault.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                        raise self._failed("locked", fault) from fault
                if left <= 0:
                    raise LockTimeout(self._path)
                time.sleep(min(pause, left))
                pause = min(pause * 2, LONGEST_PAUSE)
            if self.is_named():
                self._checked = False  # once more when we leave
                return True
        except BaseException as fault:
            self.__exit__(fault)
            raise
        self.__exit__(self)
        return False

    def _failed(self, what: str, fault: OSError) -> Refusal:
        folder = self._path.rpartition("/")[0]
        return Refusal(
            os_error_kind(fault),
            f"{self._path} cannot be {what}: {fault.strerror}",
            f"look at {folder}",
        )
