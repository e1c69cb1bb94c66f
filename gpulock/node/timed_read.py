# SPDX-License-Identifier: Apache-2.0
"""Read what waits for a process's memory, and give up on one that hangs.

Hot. /proc/PID/cmdline and environ are read out of the process (proc(5)): the kernel waits for the
lock of its memory map. One that hangs in mmap or munmap, in a driver whose card is dead or on a
file system whose server does not answer, holds it for good, and a process that reads hangs as
well (state D; only a fatal signal ends that, mm/memory.c __access_remote_vm). So a thread reads. A
thread that does not come back is left behind: the end of this process ends it too.
"""

import os
from _thread import allocate_lock, start_new_thread
from errno import EAGAIN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 1.0  # a read takes microseconds; a thread of a busy machine waits longer for its turn


class ReaderThread:
    """A thread that does one thing after the other; `finished` says whether the last one is.

    To make one raises BlockingIOError where the node has no room for a thread.
    """

    __slots__ = ("_act", "_done", "_go", "_result", "finished", "pid")

    def __init__(self) -> None:
        self.finished = True
        self.pid = os.getpid()
        self._act: "Callable[[], bytes] | None" = None
        self._result: "bytes | BaseException" = b""
        self._go, self._done = allocate_lock(), allocate_lock()
        self._go.acquire()
        self._done.acquire()
        try:
            start_new_thread(self._run, ())
        except RuntimeError as fault:  # users' processes fill the node: no fault of ours
            raise BlockingIOError(EAGAIN, f"no process can be read: {fault}") from fault

    def do(self, act: "Callable[[], bytes]", seconds: float) -> bytes:
        """Return what `act` returns, raise what it raises; TimeoutError where it takes too long.

        Then this worker is not to be used again.
        """
        self.finished = False
        self._act = act
        self._go.release()
        if not self._done.acquire(timeout=seconds):
            self._act = None  # should it come back, or get its first turn now: it ends
            if self._go.locked():
                self._go.release()
            raise TimeoutError
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def _run(self) -> None:
        while True:
            self._go.acquire()
            act = self._act
            if act is None:
                self.finished = True  # it got no turn in time, and hangs nowhere
                return
            try:
                self._result = act()
            except BaseException as fault:  # it is raised again where somebody waits for it
                self._result = fault
            self.finished = True
            self._done.release()


class TimedReader:
    """Reads of processes' memory, one at a time; those that hang are not asked again meanwhile."""

    __slots__ = ("_hung", "_worker")

    def __init__(self) -> None:
        self._worker: "ReaderThread | None" = None
        self._hung: dict[int, ReaderThread] = {}

    def read(self, pid: int, act: "Callable[[], bytes]") -> bytes:
        """Return what `act` reads of a process; raise TimeoutError for one that hangs.

        And BlockingIOError where no thread can be started.
        """
        hung = self._hung.get(pid)
        if hung is not None and not hung.finished and hung.pid == os.getpid():
            raise TimeoutError(f"process {pid} hangs: what it was started with cannot be read")
        self._hung.pop(pid, None)
        worker = self._worker
        if worker is None or worker.pid != os.getpid():  # a fork has no threads
            worker = self._worker = ReaderThread()
        try:
            return worker.do(act, SECONDS)
        except TimeoutError:
            self._worker = None
            self._hung[pid] = worker
            raise TimeoutError(
                f"process {pid} hangs: what it was started with cannot be read"
            ) from None
