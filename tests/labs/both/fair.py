# SPDX-License-Identifier: Apache-2.0
"""A hostile and an honest user on one node: both submit jobs, and the honest ones are judged."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from tests.labs.both.site import Site
from tests.labs.common.journal import Journal, complaints
from tests.support.seeds import chosen_seed
from tests.support.wait import wait_until

# Ages and periods are numbers of looks at the queue, each a tenth of a second on an idle machine.
KEPT: Final = 250  # until nothing of a job that is over holds a GPU
REAP_EVERY: Final = 15
MOST: Final = 4  # GPUs of an honest job
HOSTILE_AT_ONCE, HONEST_AT_ONCE = 6, 3


class Fair(ABC):
    """One node, and what each user has submitted; Alice is hostile."""

    jobs: ClassVar[int]  # of each user, at least, in each of three settings
    longest: ClassVar[int]  # of a hostile job, then it is ended

    def __init__(self, site: Site, devices: Sequence[Path]) -> None:
        seed = chosen_seed("GPULOCK_SEED")
        print(f"GPULOCK_SEED={seed}")
        self.site = site
        self.devices = devices
        self.rng = random.Random(seed)
        self.asked: dict[int, int] = {}  # GPUs by the number of an honest job
        self.tried: dict[int, tuple[str, float]] = {}  # what a hostile job is, and its last look
        self.living: dict[str, int] = {}  # job -> when it was last in the queue
        self.looks = 0
        self.late: set[str] = set()
        # of the honest user, and no hostile one writes there
        self.journal = Journal(site.gpus.cluster.users[site.bob].home / "journal")
        self.journal.path.unlink(missing_ok=True)

    def run(self) -> None:
        """Let both submit jobs, then wait until the honest ones have run."""
        wait_until(self._has_submitted_enough, why=lambda: f"enough jobs\n{self.describe()}")
        wait_until(
            lambda: not self._watch_queue()[self.site.bob],
            why=lambda: f"every honest job to be over\n{self.describe()}",
        )

    @abstractmethod
    def queue(self) -> list[tuple[str, int]]:
        """Return (user, job) of what is in the queue and may start by itself, or is honest."""

    @abstractmethod
    def submit_hostile(self) -> None:
        """Submit a job of the zoo; note it in `tried`."""

    def describe(self) -> str:
        """Return what was tried last; the lab's own evidence has the queue and the node."""
        return "\n".join(f"{job} {name}" for job, (name, _) in list(self.tried.items())[-30:])

    def is_healthy(self) -> bool:
        """Return whether no user's job has stopped the node."""
        return self.site.in_service()

    def expect_all_ran(self) -> None:
        """Expect that all honest jobs ran, and that no lock outlived its job."""
        assert complaints(self.asked, self.journal.holds()) == [], self.describe()
        assert self.is_healthy(), self.describe()
        assert self.late == set(), f"{self.late}\n{self.describe()}"
        print(f"{len(self.asked)} honest jobs, {len(self.tried)} hostile ones")

    def expect_nothing(self) -> None:
        """Expect, once no job is there, that nothing of any is left."""
        # a release beside other jobs of its user, which fork all the time, leaves it to gpulockd
        wait_until(
            lambda: self.site.reap() and not self.site.locks(),
            why=lambda: f"all locks to be gone\n{self.describe()}",
        )
        assert self.is_healthy(), self.describe()

    def _has_submitted_enough(self) -> bool:
        """Let both submit; return whether each has submitted enough jobs."""
        waiting = self._watch_queue()
        if len(waiting[self.site.bob]) < HONEST_AT_ONCE:
            number, gpus = len(self.asked), self.rng.randint(1, MOST)
            self.asked[number] = gpus
            text = self.journal.around("exec 9<> <(:)\nread -rt 0.2 -u 9", f"{number} here")
            self.site.submit(gpus, text, user=self.site.bob)
        if len(waiting[self.site.alice]) < HOSTILE_AT_ONCE:
            self.submit_hostile()
        return min(len(self.asked), len(self.tried)) >= self.jobs

    def _watch_queue(self) -> dict[str, list[int]]:
        """Return the jobs in the queue by user; end old ones, reap, and note late locks."""
        waiting: dict[str, list[int]] = {self.site.alice: [], self.site.bob: []}
        self.looks = now = self.looks + 1
        for user, job in self.queue():
            waiting[user].append(job)
            self.living[str(job)] = now
        old = [job for job in waiting[self.site.alice] if self.tried.get(job, ("", now))[1] < now]
        for job in old:
            self.site.cancel(job)
        if now % REAP_EVERY == 0:
            self.site.reap()
            assert self.is_healthy(), self.describe()
        for device, record in self.site.gpus.locks(self.site.node).items():
            if now - self.living.setdefault(record.job_id, now) > KEPT:
                name = self.tried.get(int(record.job_id), ("an honest one", 0.0))[0]
                self.late.add(f"{device} is held by job {record.job_id}, {name}")
        return waiting
