# SPDX-License-Identifier: Apache-2.0
"""A witness that owes nothing to gpulock: were devices free while a process of the job lived?"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tests.labs.common.lock_folder import owners

TICK = 0.002  # seconds between two looks
ROUNDING = 0.001  # seconds: the history counts milliseconds


@dataclass(frozen=True)
class Claim:
    """One claim, by what was in its locks; `folder` is where they are."""

    folder: Path
    token: str
    devices: tuple[str, ...]

    def locked(self) -> tuple[str, ...]:
        """Return the devices that it still holds."""
        return tuple(device for device in self.devices if self._holds(device))

    def _holds(self, device: str) -> bool:
        try:
            return f"token={self.token}\n" in (self.folder / device / "owner").read_text()
        except FileNotFoundError:
            return False


def claims_of(folder: Path, job: int) -> list[Claim]:
    """Return the claims of a job's that a `locks` folder has."""
    mine = [record for record in owners(folder).values() if record.job_id == str(job)]
    grants = {record.token: record.devices for record in mine}
    return [Claim(folder, token, tuple(sorted(grant))) for token, grant in grants.items()]


class Witness:
    """Looks at a claim and at processes all the time, in this order.

    A process that lives when a lock was seen gone makes the test fail at the latest at the end.
    `order` has what happened, as it was seen; `lived` when any of them was seen alive for the
    last time (epoch seconds).
    """

    def __init__(self, claim: Claim, pids: Iterable[int]) -> None:
        self.claim = claim
        self.order: list[str] = []
        self.lived = 0.0
        self._fds = dict[int, int]()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # one that came and went
                self._fds[pid] = os.pidfd_open(pid)
        self._early: list[str] = []
        self._looked, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        assert self._fds, "nobody to be seen"
        self._thread.start()
        self._looked.wait()  # what is to come is seen, however late the thread has its turn
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for fd in self._fds.values():
            os.close(fd)
        if kind is None:
            assert not self._early, (self._early, self.order)

    def never_free_too_soon(self, line: dict[str, Any]) -> None:
        """Hold a line of the history against what was seen: all had ended before."""
        assert self.lived, self.order
        assert line["released_at"] + ROUNDING >= self.lived, (line, self.lived, self.order)

    def _look(self) -> None:
        known: set[str] = set()
        while True:
            last = self._over.is_set()
            held = self.claim.locked()
            now = time.time()
            living = self._living()
            if living:
                self.lived = now
            ended = [f"process {pid} ended" for pid in self._fds if pid not in living]
            freed = [f"{device} freed" for device in self.claim.devices if device not in held]
            if freed and living:
                self._early.append(f"{freed} while {living} live")
            fresh = [event for event in [*ended, *freed] if event not in known]
            known.update(fresh)
            self.order += fresh
            self._looked.set()
            if last:
                return
            self._over.wait(TICK)

    def _living(self) -> list[int]:
        """Return who runs: the descriptor of one that ended is readable (pidfd_open(2))."""
        poll = select.poll()
        for fd in self._fds.values():
            poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        return [pid for pid, fd in self._fds.items() if fd not in ended]
