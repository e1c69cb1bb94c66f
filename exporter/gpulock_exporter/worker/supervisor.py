# SPDX-License-Identifier: Apache-2.0
"""Keep one worker at work, and never wait for it.

A frame that is late means a driver that hangs: the worker is killed. Where it was in the call of
one card, the next one leaves that card out, and so it does after a crash: a worker that looks at
all cards is as slow as the slowest. A card that is left out is tried by a process of its own, which
disturbs nobody, less and less often. Where it answers, the next worker asks it again. One that does
not even die (uninterruptible, in the driver) is abandoned and counted, and no second one is started
beside it: it would hang as well, unless it can leave a card out.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpulock.errors import one_line
from gpulock_exporter.frame import NO_CARD, PAGE, DriverCall, Frame, decode_frame, read_driver_call

LINE_LIMIT = 1 << 22  # bytes of a frame: 128 MIG devices with 100 processes each are 1 MiB
WORDS = 400  # bytes of a worker's standard error that are told
CHUNK = 1 << 16  # bytes: what a pipe holds, pipe(7)
LONG_CALL = 0.25  # of the time after which a frame is late: a shorter call is not what it waits for
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)  # signals by which a library ends its process; others may send any of the rest
FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 30.0  # seconds between two starts
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 640.0  # seconds until a card is tried again
MOST_STUCK = 4  # processes that cannot be killed, beyond which no worker is started beside them
REAP = 2.0  # seconds in which a killed process is reaped, where its driver lets it
POLL = 0.2  # seconds between two looks while a process is to start, or is to end
TRIAL = "frames=2"  # of a card that has hung: some of the calls are made from the second one on


class WorkerTimeouts(NamedTuple):
    """Seconds: for the first frame after a start (NVML initialises cards), and between two."""

    first: float = 30.0
    frame: float = 5.0


class WorkerChild:
    """A worker that is started now; raise OSError where none can be.

    `since` is when it was heard last, or started, `killed` when it was, 0 where it was not.
    `card` is the one that it hangs in, or tries: the frames of one that tries are not read.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str] | None, now: float, card: int = NO_CARD
    ) -> None:
        self.since, self.killed, self.card = now, 0.0, card
        self.is_heard = False
        self._buffer = b""
        self._page, self._words = map(os.memfd_create, ("gpulock-call", "gpulock-words"))
        for descriptor in (self._page, self._words):
            weakref.finalize(self, os.close, descriptor)
        os.ftruncate(self._page, PAGE.size)
        self.process = subprocess.Popen(
            [*argv, f"note={self._page}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if card == NO_CARD else subprocess.DEVNULL,
            stderr=self._words,
            env=env,
            start_new_session=True,  # a terminal's ^C is for the parent
            pass_fds=(self._page,),
        )
        self.frames = self.process.stdout

    def call(self) -> DriverCall | None:
        """Return the call of one card that it makes now, as far as it names one."""
        return read_driver_call(os.pread(self._page, PAGE.size, 0))

    def late_call(self, now: float, limits: WorkerTimeouts) -> DriverCall | None:
        """Return the call of one card for which a late frame waits."""
        call = self.call()
        if call is None or now - call.since < LONG_CALL * limits.frame:
            return None
        return call

    def due(self, limits: WorkerTimeouts) -> float:
        """Return until when its next frame must come, and its call be over."""
        frame = self.since + (limits.frame if self.is_heard else limits.first)
        call = self.call()
        return frame if call is None else min(frame, call.since + limits.frame)

    def receive(self, now: float) -> list[Frame]:
        """Return the frames that are whole by now; raise ValueError for garbage."""
        if self.frames is None:
            return []
        data = os.read(self.frames.fileno(), CHUNK)
        if not data:
            self.close()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > LINE_LIMIT:
            raise ValueError("a frame without end")
        frames = [decode_frame(line) for line in lines]
        if frames:
            self.is_heard, self.since = True, now
            os.ftruncate(self._words, 0)  # what a library says again and again
        return frames

    def last_words(self) -> str:
        """Return what it said since its last frame, as one line."""
        size = os.fstat(self._words).st_size
        said = os.pread(self._words, WORDS, max(0, size - WORDS)).decode("utf-8", "replace")
        return one_line(" ".join(said.strip("\0").split()))

    def kill(self, now: float) -> None:
        """Send SIGKILL, and listen no more; a driver that hangs may keep it from dying."""
        self.killed = now
        try:
            os.kill(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.close()

    def close(self) -> None:
        """Listen no more."""
        if self.frames is not None:
            self.frames.close()
        self.frames = None

    def crash(self) -> str:
        """Return by what a library ended it, empty where none did; by itself it ends in no call."""
        code = self.process.poll()
        if code is None or code >= 0:
            return "exit" if code is not None and self.call() else ""
        return signal.Signals(-code).name if -code in CRASHES else ""


@dataclass
class HungCard:
    """A card with a call that hung or crashed: which, how often, when it is tried again.

    `crash` is by what that call ended its process, empty where it hung. `is_out` is whether the
    worker leaves it out now.
    """

    call: DriverCall
    times: int = 0
    due: float = 0.0
    crash: str = ""
    is_out: bool = True

    def leave_out(self, now: float, call: DriverCall | None, crash: str = "") -> None:
        """Leave it out for a while, each time longer; None: it is the call of before."""
        self.call, self.crash, self.is_out = call or self.call, crash, True
        self.due = now + min(FIRST_PAUSE * 2 ** min(self.times, 16), LONGEST_PAUSE)
        self.times += 1

    def words(self) -> str:
        """Return it as a clause."""
        often = f", {self.times} times by now" if self.times > 1 else ""
        how = "hangs in the driver"
        if self.crash:
            how = f"ends its process by {self.crash}"
        return f"{self.call.name or 'a call'} {how}{often}"


class Supervisor:
    """One worker; call `step` again and again, from one thread.

    `cards` has those that have hung, by NVML's index. `fault` says why there is no worker, in the
    driver's words where it has some.
    """

    def __init__(
        self,
        argv: Sequence[str],
        clock: Callable[[], float],
        limits: WorkerTimeouts | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.fault = ""
        self.cards: dict[int, HungCard] = {}
        self.worker: WorkerChild | None = None
        self._trial: WorkerChild | None = None
        self._stuck: list[WorkerChild] = []  # in a card's call, killed, and not dead
        self._argv, self._clock, self._env = list(argv), clock, env
        self._limits = limits or WorkerTimeouts()
        self._not_before, self._backoff = 0.0, FIRST_BACKOFF  # of the next start

    def left_out(self) -> dict[int, HungCard]:
        """Return the cards that are left out."""
        return {index: card for index, card in self.cards.items() if card.is_out}

    @property
    def unkillable(self) -> int:
        """Return how many workers hang in the driver, were killed and do not die."""
        return len(self._stuck) + (self.worker is not None and self._outlives_kill(self.worker))

    def step(self, seconds: float) -> list[Frame]:
        """Do what is due, wait at most `seconds` for frames; return those that came.

        It comes back sooner where something is due sooner.
        """
        now = self._clock()
        self._stuck = [one for one in self._stuck if one.process.poll() is None]
        self._follow_trial(now)
        self._follow_worker(now)
        rest = POLL  # a process is to start, or to end
        if self.worker is not None and not self.worker.killed and self._trial is None:
            rest = max(0.01, self.worker.due(self._limits) - now)
        return self._receive(min(seconds, rest))

    def close(self) -> None:
        """End all processes; one that does not die is left behind."""
        for child in filter(None, (self.worker, self._trial)):
            child.kill(self._clock())
            try:
                child.process.wait(REAP)
            except subprocess.TimeoutExpired:
                pass

    def _outlives_kill(self, child: WorkerChild) -> bool:
        return child.killed > 0 and self._clock() - child.killed > REAP

    def _leave_out(self, index: int, now: float, call: DriverCall | None, crash: str = "") -> None:
        card = self.cards.setdefault(index, HungCard(DriverCall(now, index, "", "")))
        card.leave_out(now, call, crash)

    def _is_over(self, child: WorkerChild, now: float) -> bool:
        """Kill a child that is late; return whether it is over, or hangs for good in a card."""
        if child.process.poll() is not None:
            return True
        if not child.killed and now > child.due(self._limits):
            call = child.late_call(now, self._limits)
            if call is not None:
                child.card = call.card
            if child.card != NO_CARD:
                self._leave_out(child.card, now, call)
            if child is self.worker:
                hangs = f": {call.name} of GPU {call.card} hangs" if call else ""
                self.fault = f"the driver has not answered for {now - child.since:.0f} s{hangs}"
            child.kill(now)
        if (
            not self._outlives_kill(child)
            or child.card == NO_CARD
            or len(self._stuck) >= MOST_STUCK
        ):
            return False
        self._stuck.append(child)
        return True

    def _follow_worker(self, now: float) -> None:
        """Start a worker that is due, and see what becomes of the one there is."""
        worker = self.worker
        if worker is None:
            if now >= self._not_before:
                self._start(now)
        elif self._is_over(worker, now):
            self.worker = None
            self._bury(worker, now)
        elif self._outlives_kill(worker):
            self.fault = "the worker hangs in the driver and cannot be killed"

    def _start(self, now: float) -> None:
        without = ",".join(map(str, sorted(self.left_out())))
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
                hurry = call.card not in self.left_out()
                self._leave_out(call.card, now, call, crash)
        if hurry or worker.is_heard:
            self._backoff = FIRST_BACKOFF
        if not hurry:
            self._put_off(now, self.fault)

    def _follow_trial(self, now: float) -> None:
        """Try a card that is due, and let it in again where it answers."""
        trial = self._trial
        if trial is None:
            stuck = {child.card for child in self._stuck}
            due = [n for n, card in self.left_out().items() if card.due <= now and n not in stuck]
            if due:
                self._try(min(due), now)
        elif self._is_over(trial, now):
            self._trial = None
            card, code, crash = self.cards[trial.card], trial.process.poll(), trial.crash()
            if code == 0 and not crash:
                card.is_out = False
                if self.worker is not None and not self.worker.killed:
                    self.fault = ""
                    self.worker.kill(now)  # the next one asks that card
            elif code is not None and (crash or not trial.killed):  # a driver that refuses, too
                card.leave_out(now, trial.call(), crash or card.crash)

    def _try(self, index: int, now: float) -> None:
        words = (f"only={index}", TRIAL)
        try:
            self._trial = WorkerChild([*self._argv, *words], self._env, now, index)
        except OSError:
            self.cards[index].leave_out(now, None, self.cards[index].crash)

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
        except ValueError as fault:
            self.fault = str(fault)
            worker.kill(self._clock())
            return []
        if frames:
            self.fault = ""
        return frames
