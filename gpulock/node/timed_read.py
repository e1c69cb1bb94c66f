# SPDX-License-Identifier: Apache-2.0
"""Read what waits for a process's memory, and give up on one that hangs.

Hot. /proc/PID/cmdline and environ are read out of the process (proc(5)): the kernel waits for the
lock of its memory map. One that hangs in mmap or munmap, in a driver whose card is dead or on a
file system whose server does not answer, holds it for good, and a process that reads hangs as
well (state D; only a fatal signal ends that, mm/memory.c __access_remote_vm). So a thread reads. A
thread that does not come back is left behind: the end of this process ends it too.
"""

import os
from _thread import LockType, allocate_lock, start_new_thread
from errno import EAGAIN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 1.0  # a read takes microseconds; a thread of a busy machine waits longer for its turn


class TimedReader:
    """Reads of processes' memory; those that hang are not asked again meanwhile."""

    def __init__(self) -> None:
        # by pid: in which process a thread was left behind, and what it lets go once it is over
        self._hung: "dict[int, tuple[int, LockType]]" = {}

    def read(self, pid: int, act: "Callable[[], bytes]", seconds: float = float("inf")) -> bytes:
        """Return what `act` reads of a process; raise TimeoutError for one that hangs.

        It has SECONDS, or `seconds` where they are less. Raises BlockingIOError where no thread can
        be started.
        """
        if self._is_hung(pid):
            raise hung_error(pid)
        answer: "list[bytes | BaseException]" = []
        done = allocate_lock()
        done.acquire()

        def run() -> None:
            try:
                answer.append(act())
            except BaseException as fault:  # it is raised again where somebody waits for it
                answer.append(fault)
            done.release()

        try:
            start_new_thread(run, ())
        except RuntimeError as fault:  # users' processes fill the node: no fault of ours
            raise BlockingIOError(EAGAIN, f"no process can be read: {fault}") from fault
        if not done.acquire(timeout=max(0.0, min(seconds, SECONDS))):
            self._hung = {one: self._hung[one] for one in self._hung if self._is_hung(one)}
            self._hung[pid] = os.getpid(), done  # what it reads in the end is nobody's
            raise hung_error(pid)
        if isinstance(answer[0], BaseException):
            raise answer[0]
        return answer[0]

    def _is_hung(self, pid: int) -> bool:
        """Return whether a thread that was left behind still reads of a process."""
        asker, done = self._hung.get(pid, (0, None))
        return done is not None and asker == os.getpid() and done.locked()  # a fork has no threads


def hung_error(pid: int) -> TimeoutError:
    """Return the error of a process that hangs; on a node with too much to do it looks alike."""
    return TimeoutError(f"process {pid} hangs, or this node is overloaded: its memory is not read")
