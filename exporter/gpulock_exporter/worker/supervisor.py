# SPDX-License-Identifier: Apache-2.0
"""Keep one worker at work, and never wait for it.

A frame that is late means a driver that hangs: the worker is killed. Where it was in the call of
one card, the next one leaves that card out (hung_cards), and so it does after a crash. One that
does not even die (uninterruptible, in the driver) is abandoned and counted, and no second one is
started beside it: it would hang as well, unless it can leave a card out.
"""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Callable, Sequence

from gpulock_exporter.driver_calls import NO_CARD
from gpulock_exporter.telemetry import Frame, FrameError
from gpulock_exporter.worker.child import WorkerChild, WorkerTimeouts
from gpulock_exporter.worker.hung_cards import HungCards

FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 30.0  # seconds between two starts
MOST_STUCK = 4  # processes that cannot be killed, beyond which no worker is started beside them
REAP = 2.0  # seconds in which a killed process is reaped, where its driver lets it
POLL = 0.2  # seconds between two looks while a process is to start, or is to end
TRIAL = ("looks=2",)  # at a card that has hung: some of the calls are made from the second look on
PAUSED = "paused"


class Supervisor:
    """One worker; call `step` again and again, from one thread.

    `starts` counts the workers, `hung` has the cards that are left out, `shared` those of which the
    worker is to ask how much each process worked (by bus id). `paused` says that the driver is to
    be let go. `fault` says why there is no worker, in the driver's words where it has some: PAUSED
    once all of them are gone.
    """

    def __init__(
        self,
        argv: Sequence[str],
        clock: Callable[[], float],
        limits: WorkerTimeouts | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.starts, self.fault, self.paused = 0, "", False
        self.shared = frozenset[str]()
        self.hung = HungCards()
        self.worker: WorkerChild | None = None
        self._trial: WorkerChild | None = None
        self._stuck: list[WorkerChild] = []  # in a card's call, killed, and not dead
        self._argv, self._clock, self._env = list(argv), clock, env
        self._limits = limits or WorkerTimeouts()
        self._not_before, self._backoff = 0.0, FIRST_BACKOFF  # of the next start

    @property
    def abandoned(self) -> int:
        """Return how many workers hang in the driver, were killed and do not die."""
        return len(self._stuck) + (self.worker is not None and self._is_undead(self.worker))

    def step(self, seconds: float) -> list[Frame]:
        """Do what is due, wait at most `seconds` for frames; return those that came.

        It comes back sooner where something is due sooner.
        """
        now = self._clock()
        for child in [one for one in self._stuck if one.process.poll() is not None]:
            self._stuck.remove(child)
            self.hung.retry_now([child.card], now)
        if self.paused:
            self._let_go(now)
        elif self.fault == PAUSED:
            self.fault = ""
        self._follow_trial(now)
        self._follow_worker(now)
        return self._receive(min(seconds, self._rest(now)))

    def close(self) -> None:
        """End all processes; one that does not die is left behind."""
        for child in filter(None, (self.worker, self._trial)):
            child.kill(self._clock())
            try:
                child.process.wait(REAP)
            except subprocess.TimeoutExpired:
                pass

    def _let_go(self, now: float) -> None:
        """End all processes; whoever resumes does not wait for any pause."""
        self.hung.retry_now(self.hung.cards, now)
        self._not_before = 0.0
        children = [one for one in (self.worker, self._trial) if one is not None]
        for child in children:
            if not child.killed:
                self.fault = ""
                child.kill(now)
        if not children and not self._stuck:
            self.fault = PAUSED

    def _is_undead(self, child: WorkerChild) -> bool:
        return child.killed > 0 and self._clock() - child.killed > REAP

    def _rest(self, now: float) -> float:
        """Return for how many seconds there is nothing to do unless something comes."""
        if self.worker is None or self.worker.killed or self._trial is not None:
            return POLL
        return max(0.01, self.worker.due(self._limits) - now)

    def _is_gone(self, child: WorkerChild, now: float) -> bool:
        """Kill a child that is late; return whether it is over, or hangs for good in a card."""
        if child.process.poll() is not None:
            return True
        if not child.killed and now > child.due(self._limits):
            call = child.late_call(now, self._limits)
            if call is not None:
                child.card = call.card
            if child.card != NO_CARD:
                self.hung.leave_out(child.card, call, now)
            if child is self.worker:
                hangs = f": {call.name} of GPU {call.card} hangs" if call else ""
                self.fault = f"the driver has not answered for {now - child.since:.0f} s{hangs}"
            child.kill(now)
        if not self._is_undead(child) or child.card == NO_CARD or len(self._stuck) >= MOST_STUCK:
            return False
        self._stuck.append(child)
        return True

    def _follow_worker(self, now: float) -> None:
        """Start a worker that is due, and see what becomes of the one there is."""
        worker = self.worker
        if worker is None:
            if now >= self._not_before and not self.paused:
                self._start(now)
        elif self._is_gone(worker, now):
            self.worker = None
            self._bury(worker, now)
        elif self._is_undead(worker):
            self.fault = "the worker hangs in the driver and cannot be killed"
        elif not worker.killed:
            worker.share(self.shared)

    def _start(self, now: float) -> None:
        self.starts += 1
        without = ",".join(map(str, sorted(self.hung.out())))
        words = [f"without={without}"] if without else []
        try:
            self.worker = WorkerChild([*self._argv, *words], self._env, now)
        except OSError as fault:
            self._put_off(now, f"the worker does not start: {fault}")

    def _put_off(self, now: float, fault: str) -> None:
        """Put off the next start, each time longer until a worker has sent a frame."""
        self.fault = fault
        self._not_before = now + self._backoff
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)

    def _bury(self, worker: WorkerChild, now: float) -> None:
        """Decide how soon the next one starts: at once where it is to ask other cards."""
        worker.close()
        hurry = worker.card != NO_CARD or (worker.killed > 0 and not self.fault)
        call, crash = worker.call(), worker.crash()
        if not worker.killed:
            self.fault = worker.last_words() or f"the worker ended with {worker.process.returncode}"
            if call is not None and crash:
                hurry = call.card not in self.hung.out()
                self.hung.leave_out(call.card, call, now, crash)
        if hurry or worker.is_heard:
            self._backoff = FIRST_BACKOFF
        if not hurry:
            self._put_off(now, self.fault)

    def _follow_trial(self, now: float) -> None:
        """Try a card that is due, and let it in again where it answers."""
        trial = self._trial
        if trial is None:
            card = self.hung.due(now, {child.card for child in self._stuck})
            if card is not None and not self.paused:
                self._try(card, now)
        elif self._is_gone(trial, now):
            self._trial = None
            code, crash = trial.process.poll(), trial.crash()
            if code == 0:
                self.hung.let_in(trial.card)
                if self.worker is not None and not self.worker.killed:
                    self._end(self.worker, "")  # the next one asks that card
            elif code is not None and (crash or not trial.killed):  # a driver that refuses, too
                before = self.hung.cards[trial.card]
                self.hung.leave_out(trial.card, trial.call(), now, crash or before.crash)

    def _try(self, card: int, now: float) -> None:
        words = (f"only={card}", *TRIAL)
        try:
            self._trial = WorkerChild([*self._argv, *words], self._env, now, card)
        except OSError:
            self.hung.leave_out(card, None, now, self.hung.cards[card].crash)

    def _end(self, worker: WorkerChild, fault: str) -> None:
        self.fault = fault
        worker.kill(self._clock())

    def _receive(self, seconds: float) -> list[Frame]:
        """Wait for output; return every whole frame, oldest first. Garbage ends the worker."""
        worker = self.worker
        if worker is None or worker.frames is None:
            time.sleep(max(0.0, seconds))
            return []
        poll = select.poll()
        poll.register(worker.frames, select.POLLIN)
        if not poll.poll(max(0.0, seconds) * 1000):
            return []
        try:
            frames = worker.receive(self._clock())
        except FrameError as fault:
            self._end(worker, str(fault))
            return []
        if frames:
            self.fault = ""
        return frames
