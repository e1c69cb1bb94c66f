# SPDX-License-Identifier: Apache-2.0
"""Slow checks, one at a time and first come first served, never more than the node can spare.

bcrypt is slow on purpose (48 ms at cost 10), so strangers could spend all of a node's time on
wrong passwords. One thread does the checks; a client has few waiting, and all together few more,
so that a thousand from one address delay another by two.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable

_WAITING_OF_ONE_CLIENT = 2
_WAITING = 16


class _Job:
    __slots__ = ("check", "client", "deadline", "done", "result")

    def __init__(self, client: str, check: Callable[[], bool], deadline: float) -> None:
        self.client = client
        self.check = check
        self.deadline = deadline
        self.done = threading.Event()
        self.result: bool | None = None


class CheckQueue:
    """A short queue with one worker, which is there only while something waits."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self._of_client: Counter[str] = Counter()
        self._has_worker = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def run(self, client: str, check: Callable[[], bool], deadline: float) -> bool | None:
        """Return what the check says; None when there is no place, or no time, for it."""
        job = _Job(client, check, deadline)
        with self._lock:
            if (
                len(self._jobs) >= _WAITING
                or self._of_client[client] >= _WAITING_OF_ONE_CLIENT
                or not self._worker()
            ):
                return None
            self._jobs.append(job)
            self._of_client[client] += 1
        job.done.wait(min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX))
        return job.result

    def _worker(self) -> bool:
        """Have a worker; False when there can be no more threads. Under the lock."""
        if not self._has_worker:
            try:
                threading.Thread(target=self._work, name="passwords", daemon=True).start()
            except RuntimeError:
                return False
            self._has_worker = True
        return True

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                if time.monotonic() < job.deadline:
                    job.result = job.check()
            except ValueError:  # bcrypt's, of what it does not like: not checked
                continue
            finally:
                self._finish(job)

    def _next(self) -> _Job | None:
        with self._lock:
            if self._jobs:
                return self._jobs[0]
            self._has_worker = False
            return None

    def _finish(self, job: _Job) -> None:
        with self._lock:
            self._jobs.popleft()
            self._of_client[job.client] -= 1
            if not self._of_client[job.client]:
                del self._of_client[job.client]
        job.done.set()
