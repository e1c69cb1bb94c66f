# SPDX-License-Identifier: Apache-2.0
"""Keep one worker at work, and never wait for it.

A frame that is late means a driver that hangs: the worker is killed. Where it was in the call of
one card, the next one leaves that card out (hung_cards), and so it does after a crash. One that
does not even die (uninterruptible, in the driver) is abandoned and counted, and no second one is
started beside it: it would hang as well, unless it can leave a card out.
"""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Callable, Sequence

from gpulock_exporter.driver_calls import NO_CARD
from gpulock_exporter.telemetry import Frame, FrameError
from gpulock_exporter.worker.child import CHUNK, WorkerChild, WorkerTimeouts
from gpulock_exporter.worker.hung_cards import HungCards

FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 30.0  # seconds between two starts
LONG_CALL = 0.25  # of the time after which a frame is late: a shorter call is not what it waits for
MOST_STUCK = 4  # processes that cannot be killed, beyond which no worker is started beside them
REAP = 2.0  # seconds in which a killed process is reaped, where its driver lets it
POLL = 0.2  # seconds between two looks whether a process that is ending is over
MOMENT = 0.01  # seconds that a sleep lasts at least, where nobody wants a shorter one


class Supervisor:
    """One worker; call `step` again and again, from one thread.

    `starts` counts the workers, `hung` has the cards that are left out, `shared` those of which the
    worker is to ask how much each process worked (by bus id). `fault` says why there is no worker,
    in the driver's words where it has some.
    """

    def __init__(
        self,
        argv: Sequence[str],
        clock: Callable[[], float],
        limits: WorkerTimeouts | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.starts, self.fault = 0, ""
        self.shared = frozenset[str]()
        self.hung = HungCards()
        self.worker: WorkerChild | None = None
        self._trial: WorkerChild | None = None
        self._stuck: list[WorkerChild] = []  # in a card's call, killed, and not dead
        self._argv, self._clock, self._env = list(argv), clock, env
        self._limits = limits or WorkerTimeouts()
        self._not_before, self._backoff = 0.0, FIRST_BACKOFF  # of the next start
        self._paused_until = 0.0  # a signal handler sets these two, at any moment
        self._hurry = False
        self._bell, self._ringer = os.pipe()
        os.set_blocking(self._ringer, False)

    @property
    def abandoned(self) -> int:
        """Return how many workers hang in the driver, were killed and do not die."""
        return len(self._stuck) + (self.worker is not None and self._is_undead(self.worker))

    def is_paused(self) -> bool:
        """Return whether the driver is let go on purpose."""
        return self._clock() < self._paused_until

    def pause(self, seconds: float) -> None:
        """Let go of the driver, so that a GPU can be reset; ends by itself. For signal handlers."""
        self._paused_until = self._clock() + seconds
        self.wake()

    def resume(self) -> None:
        """Take up work again. For signal handlers."""
        self._paused_until = 0.0
        self._hurry = True
        self.wake()

    def wake(self) -> None:
        """End the sleep of a step. For signal handlers: Python itself would sleep on."""
        try:
            os.write(self._ringer, b".")
        except OSError:
            pass  # so many rings that nobody is asleep, or closed already

    def step(self, seconds: float) -> list[Frame]:
        """Do what is due, wait at most `seconds` for frames; return those that came.

        It comes back sooner where something is due sooner, or where a signal has come.
        """
        now = self._clock()
        if self._hurry:
            self._hurry, self._not_before = False, 0.0
        for child in [one for one in self._stuck if one.process.poll() is not None]:
            self._stuck.remove(child)
            self.hung.retry_now([child.card], now)
        if self.is_paused():
            self.hung.retry_now(self.hung.cards, now)
        self._follow_trial(now)
        self._follow_worker(now)
        if self.worker is None and now >= self._not_before and not self.is_paused():
            self._start(now)
        return self._receive(min(seconds, self._rest(now)))

    def close(self) -> None:
        """End all processes; one that does not die is left behind."""
        for child in filter(None, (self.worker, self._trial)):
            child.kill(self._clock())
            try:
                child.process.wait(REAP)
            except subprocess.TimeoutExpired:
                pass
        ends, self._bell, self._ringer = (self._bell, self._ringer), -1, -1
        for end in ends:
            if end >= 0:
                os.close(end)

    def _is_undead(self, child: WorkerChild) -> bool:
        return child.killed > 0 and self._clock() - child.killed > REAP

    def _rest(self, now: float) -> float:
        """Return for how many seconds there is nothing to do unless something comes."""
        if self.worker is None:
            return max(MOMENT, max(self._not_before, self._paused_until) - now)
        if self._trial is not None or self.worker.frames is None:
            return POLL
        return max(MOMENT, self.worker.due(self._limits) - now)

    def _start(self, now: float) -> None:
        self.starts += 1
        try:
            words = self.hung.words_without()
            self.worker = WorkerChild([*self._argv, *words], self._env, now)
        except OSError as fault:
            self._put_off(now, f"the worker does not start: {fault}")

    def _put_off(self, now: float, fault: str) -> None:
        """Put off the next start, each time longer until a worker has sent a frame."""
        self.fault = fault
        self._not_before = now + self._backoff
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)

    def _follow_worker(self, now: float) -> None:
        """Kill the worker where it is late, and notice that it is over."""
        worker = self.worker
        if worker is None:
            return
        if worker.process.poll() is not None:
            self.worker = None
            self._bury(worker, now)
        elif not worker.killed and self.is_paused():
            self._end(worker, "paused")
        elif not worker.killed and now > worker.due(self._limits):
            call = worker.call()
            fault = f"the driver has not answered for {now - worker.since:.0f} s"
            if call is not None and now - call.since >= LONG_CALL * self._limits.frame:
                fault = f"{fault}: {call.name} of GPU {call.card} hangs"
                worker.card = call.card
                self.hung.leave_out(call, now)
            self._end(worker, fault)
        elif not self._is_undead(worker):
            worker.share(self.shared)
        elif worker.card != NO_CARD and len(self._stuck) < MOST_STUCK:
            self._stuck.append(worker)
            self.worker = None
        else:
            self.fault = "the worker hangs in the driver and cannot be killed"

    def _end(self, worker: WorkerChild, fault: str) -> None:
        self.fault = fault
        worker.kill(self._clock())

    def _bury(self, worker: WorkerChild, now: float) -> None:
        """Decide how soon the next one starts: at once where it is to ask other cards."""
        worker.close()
        hurry = worker.card != NO_CARD or (worker.killed > 0 and not self.fault)
        call, crash = worker.call(), worker.crash()
        if not worker.killed:
            self.fault = worker.last_words() or f"the worker ended with {worker.process.returncode}"
            if call is not None and crash:
                hurry = call.card not in self.hung.out()
                self.hung.leave_out(call, now, crash)
        if hurry or worker.is_heard:
            self._backoff = FIRST_BACKOFF
        if not hurry:
            self._put_off(now, self.fault)

    def _follow_trial(self, now: float) -> None:
        """Try a card that is due, and let it in again where it answers."""
        trial = self._trial
        if trial is None:
            card = self.hung.due(now, {child.card for child in self._stuck})
            if card is not None and not self.is_paused():
                self._try(card, now)
            return
        before = self.hung.cards[trial.card]
        code, call, crash = trial.process.poll(), trial.call() or before.call, trial.crash()
        if code is not None:
            self._trial = None
        if code == 0:
            self.hung.let_in(trial.card)
            if self.worker is not None and not self.worker.killed:
                self._end(self.worker, "")  # the next one asks that card
        elif code is not None and (crash or not trial.killed):  # the driver refuses: no better
            self.hung.leave_out(call, now, crash or before.crash)
        elif self._is_undead(trial):
            self._stuck.append(trial)
            self._trial = None
        elif not trial.killed and self.is_paused():
            trial.kill(now)
        elif not trial.killed and now > trial.due(self._limits):
            self.hung.leave_out(call, now)
            trial.kill(now)

    def _try(self, card: int, now: float) -> None:
        words = self.hung.words_of_trial(card)
        try:
            self._trial = WorkerChild([*self._argv, *words], self._env, now, card)
        except OSError:
            before = self.hung.cards[card]
            self.hung.leave_out(before.call, now, before.crash)

    def _receive(self, seconds: float) -> list[Frame]:
        """Wait for output; return every whole frame, oldest first. Garbage ends the worker."""
        worker = self.worker
        pipe = worker.frames if worker is not None else None
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(max(0.0, seconds))]
        if self._bell in ready:
            os.read(self._bell, CHUNK)
        if worker is None or pipe not in ready:
            return []
        try:
            frames = worker.receive(self._clock())
        except FrameError as fault:
            self._end(worker, str(fault))
            return []
        if frames:
            self.fault = ""
        return frames
