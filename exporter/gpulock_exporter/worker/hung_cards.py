# SPDX-License-Identifier: Apache-2.0
"""Cards whose calls hang in the driver or crash: left out of the worker, tried apart, let in again.

A worker that looks at all cards is as slow as the slowest. The one that is started after a hang or
a crash leaves out the card in whose call the last one was. That card is tried by a process of its
own, which disturbs nobody, less and less often. Where it answers, the next worker asks it again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpulock_exporter.driver_calls import CardFilter, DriverCall
from gpulock_exporter.worker.child import WorkerChild
from gpulock_exporter.worker.restart_policy import (
    WorkerAction,
    WorkerStatus,
    WorkerTimeouts,
    decide_worker_action,
)

CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)  # signals by which a library ends its process; others may send any of the rest
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 640.0  # seconds until a card is tried again
FORGOTTEN = 3600.0  # seconds without a hang, after which the pauses start over
MOST_STUCK = 4  # processes that cannot be killed, beyond which no worker is started beside them


class HungCard(NamedTuple):
    """A card with a call that hung or crashed: which, when, how often, when it is tried again.

    `crash` is the signal by which that call ended its process, 0 where it hung.
    """

    call: DriverCall
    at: float
    times: int
    due: float
    out: bool = True
    crash: int = 0

    def words(self) -> str:
        """Return it as a clause."""
        often = f", {self.times} times by now" if self.times > 1 else ""
        how = "hangs in the driver"
        if self.crash:
            how = f"ends its process by {signal.Signals(self.crash).name}"
        return f"{self.call.name or 'a call'} {how}{often}"


def card_after_hang(
    before: HungCard | None, call: DriverCall, now: float, crash: int = 0
) -> HungCard:
    """Return a card whose call has hung or crashed now (CLOCK_BOOTTIME seconds). Pure."""
    again = before is not None and now - before.at < FORGOTTEN
    times = before.times + 1 if before is not None and again else 1
    pause = min(FIRST_PAUSE * 2 ** min(times - 1, 16), LONGEST_PAUSE)
    return HungCard(call, now, times, now + pause, crash=crash)


def crash_signal(code: int | None) -> int:
    """Return the signal by which a library ended its process, 0 where it did not. Pure."""
    return -code if code is not None and -code in CRASHES else 0


class HungCards:
    """Those of one node, by NVML's index; called by the supervisor's thread alone."""

    def __init__(
        self,
        argv: Sequence[str],
        clock: Callable[[], float],
        limits: WorkerTimeouts,
        env: Mapping[str, str] | None,
    ) -> None:
        self.cards: dict[int, HungCard] = {}
        self._argv = list(argv)
        self._clock = clock
        self._limits = limits
        self._env = env
        self._stuck: list[tuple[int, WorkerChild]] = []  # killed, and not dead
        self._trial: tuple[int, WorkerChild] | None = None
        self._seen = WorkerStatus()  # of the trial

    def out(self) -> dict[int, HungCard]:
        """Return the cards that are left out."""
        return {index: card for index, card in self.cards.items() if card.out}

    @property
    def stuck(self) -> int:
        """Return how many processes hang in a card's call and cannot be killed."""
        return len(self._stuck)

    def filter_words(self) -> list[str]:
        """Return the options of a worker that is to leave these cards out."""
        out = self.out()
        cards = max((card.call.cards for card in out.values()), default=0)
        indexes = frozenset(index for index, card in out.items() if card.call.cards == cards)
        return CardFilter(cards, indexes).words()

    def leave_out(self, call: DriverCall, crash: int = 0) -> None:
        """Leave out the card of a call that hangs, or that crashed by a signal."""
        before = self.cards.get(call.card)
        self.cards[call.card] = card_after_hang(before, call, self._clock(), crash)

    def keep_stuck(self, index: int, child: WorkerChild) -> bool:
        """Take over a process that hangs in a card's call and does not die; return whether."""
        if len(self._stuck) < MOST_STUCK:
            self._stuck.append((index, child))
            return True
        return False

    def retry_now(self) -> None:
        """Try every card soon, and end a trial: the driver is let go of."""
        now = self._clock()
        self.cards = {index: card._replace(due=now) for index, card in self.cards.items()}
        if self._trial is not None and not self._seen.killed:
            self._kill_trial()

    def step(self) -> bool:
        """Go on with the trials; return whether a card answers again."""
        now = self._clock()
        for index, child in list(self._stuck):
            if child.process.poll() is not None:
                self._stuck.remove((index, child))
                self.cards[index] = self.cards[index]._replace(due=now)
        if self._trial is not None:
            return self._follow_trial(*self._trial)
        stuck = {index for index, _ in self._stuck}
        due = [n for n, card in self.out().items() if card.due <= now and n not in stuck]
        if due:
            self._try(min(due))
        return False

    def close(self) -> None:
        """End the trial; what does not die is left behind."""
        if self._trial is not None:
            self._kill_trial()
            self._trial[1].process.poll()

    # --- inner --------------------------------------------------------------------------------

    def _try(self, index: int) -> None:
        """Start a process that looks at one card."""
        words = CardFilter(self.cards[index].call.cards, only=index).words()
        try:
            child = WorkerChild([*self._argv, *words], self._env, listened=False)
        except OSError:
            self.leave_out(self.cards[index].call, self.cards[index].crash)
            return
        self._trial = index, child
        self._seen = WorkerStatus(running=True, since=self._clock())

    def _follow_trial(self, index: int, child: WorkerChild) -> bool:
        """Look how a trial goes; return whether its card answered."""
        code = child.process.poll()
        if code is not None:
            self._trial = None
            if code == 0:
                self.cards[index] = self.cards[index]._replace(out=False)
                return True
            if crash := crash_signal(code):
                self.leave_out(child.call() or self.cards[index].call, crash)
            elif not self._seen.killed:  # the driver refuses: no better
                self.leave_out(self.cards[index].call, self.cards[index].crash)
            return False
        seen = replace(self._seen, calling=child.calling_since())
        act = decide_worker_action(self._clock(), seen, self._limits)
        if act is WorkerAction.KILL:
            self.leave_out(child.call() or self.cards[index].call)
            self._kill_trial()
        elif act is WorkerAction.ABANDON:
            self._stuck.append((index, child))
            self._trial = None
        return False

    def _kill_trial(self) -> None:
        if self._trial is not None:
            self._trial[1].kill()
            self._seen = replace(self._seen, killed=self._clock())
