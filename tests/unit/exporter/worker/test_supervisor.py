# SPDX-License-Identifier: Apache-2.0
"""What the supervisor decides: workers that are what a test says, on a clock that it moves.

A real one that hangs, crashes or prints is in tests/exporter/test_whole_driver.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from gpulock_exporter.frame import NO_CARD, DriverCall, Frame
from gpulock_exporter.worker import supervisor as module
from gpulock_exporter.worker.supervisor import (
    FIRST_PAUSE,
    LONGEST_BACKOFF,
    LONGEST_PAUSE,
    MOST_STUCK,
    REAP,
    HungCard,
    Supervisor,
    WorkerChild,
    WorkerTimeouts,
)

from tests.support.clock import VirtualClock
from tests.support.pairs import pairwise

LIMITS = WorkerTimeouts(first=30, frame=5)
MORE = ("1", "1,2", "1,2,3")
TRIAL = ["only=1", "frames=2"]
ENDLESS = os.open("/dev/zero", os.O_RDONLY)  # it can be read at any time


class Child(WorkerChild):
    """A worker without a process: `returncode` is how it ended, `calling` in which call it is."""

    def __init__(
        self, argv: Sequence[str], _: Mapping[str, str] | None, now: float, card: int = NO_CARD
    ) -> None:
        self.words, self.since, self.killed, self.card = argv[1:], now, 0.0, card
        self.is_heard = self.sends = self.undead = self.babbles = False
        self.returncode: int | None = None
        self.calling: DriverCall | None = None
        self.said = ""
        process: Any = self
        self.process, self.poll = process, lambda: self.returncode
        frames: Any = SimpleNamespace(fileno=lambda: ENDLESS)
        self.frames = frames

    def call(self) -> DriverCall | None:
        """Return the call in which it is."""
        return self.calling

    def last_words(self) -> str:
        """Return what it said."""
        return self.said

    def receive(self, now: float) -> list[Frame]:
        """Return a frame, if it sends any."""
        if self.babbles:
            raise ValueError("no frame")
        if not self.sends:
            return []
        self.is_heard, self.since = True, now
        return [Frame(now)]

    def kill(self, now: float) -> None:
        """Die, unless it is undead."""
        self.killed = now
        self.returncode = self.returncode if self.undead else -signal.SIGKILL

    def wait(self, _: float) -> None:
        """Be dead."""

    def close(self) -> None:
        """Listen no more."""


class Site:
    """A supervisor, its clock, and every worker that it started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = VirtualClock()
        self.children: list[Child] = []
        self.prepare: Callable[[Child], None] = lambda _: None  # what is so from the start
        monkeypatch.setattr(module, "WorkerChild", self._start)
        monkeypatch.setattr(f"{module.__name__}.time.sleep", lambda _: None)
        self.supervisor = Supervisor(["worker"], self.clock, LIMITS)
        self.supervisor.step(0)

    def _start(self, *about: Any) -> Child:
        self.children.append(Child(*about))
        self.prepare(self.children[-1])
        return self.children[-1]

    @property
    def worker(self) -> Child:
        """Return the one that was started last."""
        return self.children[-1]

    def starts(self) -> list[list[str]]:
        """Return the words by which each was started."""
        return [list(one.words) for one in self.children]

    def wait(self, seconds: float = 0) -> None:
        """Let time pass, and what is due be done."""
        for part in range(int(seconds * 2) + 3):
            self.clock.now += 0.5 if part < seconds * 2 else 0
            self.supervisor.step(0)

    def hang(self, card: int = 1) -> None:
        """Let the worker hang in a call of a card."""
        self.worker.sends = False
        self.worker.calling = DriverCall(self.clock.now, card, "0000:3b:00.0", "nvmlX")

    def end(self, code: int, said: str = "") -> None:
        """Let the worker end."""
        self.worker.returncode, self.worker.said = code, said


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


def test_a_worker_that_falls_silent_is_killed_and_another_one_started(site: Site) -> None:
    site.worker.sends = True
    site.wait(1)
    site.worker.sends = False
    site.clock.now += LIMITS.frame + 0.1
    site.supervisor.step(0)
    assert (site.worker.killed > 0, len(site.children)) == (True, 1)
    assert site.supervisor.fault == "the driver has not answered for 5 s"
    site.wait(2)
    assert site.starts() == [[], []]


def test_starts_grow_rare_until_a_frame_comes(site: Site) -> None:
    site.prepare = lambda child: setattr(child, "returncode", 3)
    site.end(3, "Driver Not Loaded")
    site.supervisor.step(0)
    assert site.supervisor.fault == "Driver Not Loaded"
    site.wait(200)
    begun = [child.since for child in site.children]
    gaps = [later - sooner for sooner, later in pairwise(begun)]
    assert gaps[0] <= 2 and gaps == sorted(gaps)
    assert LONGEST_BACKOFF <= gaps[-1] <= LONGEST_BACKOFF + 2
    site.prepare = lambda child: setattr(child, "sends", True)
    site.wait(2 * LONGEST_BACKOFF)
    assert site.supervisor.fault == ""
    site.end(3)
    site.wait(2)
    assert site.worker.returncode is None, "the next one is soon started again"


def test_a_program_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(["/no/such/worker"], VirtualClock())
    supervisor.step(0)
    assert "does not start" in supervisor.fault


def test_the_next_worker_leaves_the_card_out_until_a_trial_of_its_own_succeeds(site: Site) -> None:
    site.worker.sends = True
    site.wait(1)
    site.hang()
    site.wait(LIMITS.frame + 0.5)
    assert site.starts() == [[], ["without=1"]]
    assert site.supervisor.fault == "the driver has not answered for 6 s: nvmlX of GPU 1 hangs"
    (card,) = site.supervisor.left_out().values()
    assert card.words() == "nvmlX hangs in the driver"
    site.worker.sends = True
    site.wait(FIRST_PAUSE + 0.5)
    assert site.starts()[2:] == [TRIAL], "which hangs before it names a call"
    site.wait(LIMITS.first + 0.5)
    assert card.words() == "nvmlX hangs in the driver, 2 times by now"
    site.wait(2 * FIRST_PAUSE)
    assert site.starts()[3:] == [TRIAL]
    site.end(0)
    site.wait(1)
    assert site.starts()[4:] == [[]]
    assert site.supervisor.left_out() == {}


def test_a_crash_stays_told_until_a_trial_ends_otherwise(site: Site) -> None:
    site.hang()
    site.end(-signal.SIGSEGV)
    site.wait()
    site.worker.sends = True
    site.wait(FIRST_PAUSE + 0.5)
    site.end(3)  # the driver refuses
    site.wait(1)
    (card,) = site.supervisor.left_out().values()
    assert card.words() == "nvmlX ends its process by SIGSEGV, 2 times by now"
    site.wait(2 * FIRST_PAUSE)
    site.worker.calling = DriverCall(site.clock.now, 1, "0000:3b:00.0", "nvmlY")
    site.end(0)  # no answer of the card: it was in a call
    site.wait(1)
    assert card.words() == "nvmlY ends its process by exit, 3 times by now"


def test_garbage_ends_the_worker(site: Site) -> None:
    site.worker.babbles = True
    site.supervisor.step(0)
    assert (site.supervisor.fault, site.worker.killed > 0) == ("no frame", True)


def test_a_trial_is_ended_with_the_rest(site: Site) -> None:
    site.hang()
    site.wait(LIMITS.frame + 0.5)
    site.worker.sends = True
    site.wait(FIRST_PAUSE + 0.5)
    site.supervisor.close()
    assert all(child.killed for child in site.children)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        *((-one, one.name) for one in (signal.SIGSEGV, signal.SIGABRT)),
        *((-one, "") for one in (signal.SIGKILL, signal.SIGTERM)),
        *((one, "exit") for one in (0, 7)),
    ],
)
def test_a_worker_that_a_card_crashes_is_replaced_at_once_by_one_without_it(
    site: Site, code: int, how: str
) -> None:
    site.hang()
    site.end(code)
    site.wait()
    if not how:  # whoever ended it, it was not the card
        assert (site.starts(), site.supervisor.left_out()) == ([[]], {})
        return
    assert site.starts() == [[], ["without=1"]]
    (card,) = site.supervisor.left_out().values()
    assert card.words() == f"nvmlX ends its process by {how}"
    site.hang()  # in the card that it was told to leave out
    site.end(code)
    site.wait()
    assert len(site.starts()) == 2, "not at once"


def test_a_call_that_has_only_begun_is_not_what_a_late_frame_waits_for(site: Site) -> None:
    site.clock.now += LIMITS.first + 1
    site.hang()
    site.supervisor.step(0)
    assert "has not answered" in site.supervisor.fault and not site.supervisor.left_out()


def test_beside_one_that_cannot_be_killed_another_is_started_only_without_its_card(
    site: Site,
) -> None:
    site.prepare = lambda child: setattr(child, "undead", True)
    site.worker.undead = True
    for card in range(MOST_STUCK + 1):
        site.hang(card)
        site.wait(LIMITS.frame + 0.5)
        assert site.supervisor.unkillable == card
        site.wait(REAP + 0.5)
        assert site.supervisor.unkillable == card + 1
        assert len(site.children) == min(card + 2, MOST_STUCK + 1)
    site.wait(60)
    workers = [words for words in site.starts() if "frames=2" not in words]
    assert workers == [[], ["without=0"], *[[f"without=0,{more}"] for more in MORE]]
    assert site.supervisor.fault == "the worker hangs in the driver and cannot be killed"
    for child in site.children:
        child.returncode = -signal.SIGKILL  # the driver lets go at last
    site.wait(1)
    assert site.supervisor.unkillable == 0
    assert site.worker.returncode is None, "another is at work"


def test_beside_one_that_hangs_in_no_cards_call_none_is_started(site: Site) -> None:
    site.worker.undead = True
    site.wait(LIMITS.first + 60)
    assert (len(site.children), site.supervisor.unkillable) == (1, 1)


def test_pauses_grow() -> None:
    card = HungCard(DriverCall(10.0, 3, "0000:3b:00.0", "nvmlX"))
    now, pauses = 0.0, list[float]()
    for _ in range(12):
        card.leave_out(now, None)
        pauses.append(card.due - now)
        now = card.due
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE and pauses == sorted(pauses)
