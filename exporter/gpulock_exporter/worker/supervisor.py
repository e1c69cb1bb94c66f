# SPDX-License-Identifier: Apache-2.0
"""Keep one worker at work, and never wait for it.

A frame that is late means a driver that hangs: the worker is killed. Where it was in the call of
one card, the next one leaves that card out (hung_cards), and so it does after a crash. One that
does not even die (uninterruptible, in the driver) is abandoned and counted, and no second one is
started beside it: it would hang as well, unless it can leave a card out. What is due is decided in
restart_policy; `Supervisor.step` does it. It sleeps until there is something to do: a wakening
costs the node as much as a good deal of work.
"""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpulock_exporter.driver_calls import DriverCall
from gpulock_exporter.telemetry import LINE_LIMIT, Frame, FrameError, decode_frame
from gpulock_exporter.worker.child import WorkerChild
from gpulock_exporter.worker.hung_cards import HungCards, crash_signal
from gpulock_exporter.worker.restart_policy import (
    POLL,
    REAP,
    WorkerAction,
    WorkerStatus,
    WorkerTimeouts,
    decide_worker_action,
    seconds_until_action,
)

FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 30.0  # seconds between two starts
LONG_CALL = 0.25  # of the time after which a frame is late: a shorter call is not what it waits for
WORDS = 400  # bytes of a worker's standard error that are kept
CHUNK = 1 << 16  # bytes: what a pipe holds, pipe(7)


class Supervisor:
    """One worker; call `step` again and again, from one thread.

    `abandoned` counts the workers that could not be killed and are not reaped yet, `starts` all.
    `hung` has the cards that are left out, `shared` those of which the worker is to ask how much
    each process worked (by bus id), `worker` is the one at work.
    `fault` says why there is no worker, in the driver's words where it has some.
    """

    def __init__(
        self,
        argv: Sequence[str],
        clock: Callable[[], float],
        limits: WorkerTimeouts | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.starts = 0
        self.fault = ""
        self.shared = frozenset[str]()
        self._argv = list(argv)
        self._clock = clock
        self._limits = limits or WorkerTimeouts()
        self._env = env
        self._seen = WorkerStatus()
        self._paused_until = 0.0  # a signal handler sets these two, at any moment
        self._hurry = False
        self.hung = HungCards(argv, clock, self._limits, env)
        self._named: DriverCall | None = None  # the card's call in which the last one was killed
        self.worker: WorkerChild | None = None
        self._child: subprocess.Popen[bytes] | None = None  # its process
        self._buffer = self._words = b""
        self._backoff = FIRST_BACKOFF
        self._ending = False  # it has closed a pipe
        self._rung = False
        self._bell, self._ringer = os.pipe()
        self._selector = selectors.DefaultSelector()
        for end in (self._bell, self._ringer):
            os.set_blocking(end, False)
        self._selector.register(self._bell, selectors.EVENT_READ)

    @property
    def abandoned(self) -> int:
        """Return how many workers hang in the driver."""
        return int(self._seen.abandoned) + self.hung.stuck

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
        self._rung = True
        try:
            os.write(self._ringer, b".")
        except OSError:
            pass  # so many rings that nobody is asleep, or closed already

    def step(self, seconds: float) -> list[Frame]:
        """Do what is due, wait at most `seconds` for frames; return those that came.

        It comes back sooner where something is due sooner, or where a signal has come.
        """
        self._drain_wakeups()
        self._reap()
        if self._hurry:
            self._hurry = False
            self._seen = replace(self._seen, not_before=0.0)
        if self.is_paused():
            self.hung.retry_now()
        elif self.hung.step() and self.worker is not None and not self._seen.killed:
            self._end_worker("")  # the next one asks the card that answers again
        seen = replace(self._seen, paused_until=self._paused_until)
        if self.worker is not None:
            seen = replace(seen, calling=self.worker.calling_since())
        act = decide_worker_action(self._clock(), seen, self._limits)
        if act is WorkerAction.START:
            self._start()
        elif act is WorkerAction.KILL:
            self._kill()
        elif act is WorkerAction.ABANDON:
            self._abandon()
        if self.worker is not None:
            self.worker.share(self.shared)
        return self._receive(min(seconds, self._rest()))

    def close(self) -> None:
        """End the worker; one that does not die is left behind."""
        if self._child is not None:
            self._child.kill()
            self._close_pipes()
            try:
                self._child.wait(REAP)
            except subprocess.TimeoutExpired:
                pass
        self.hung.close()
        self._selector.close()
        ends, self._bell, self._ringer = (self._bell, self._ringer), -1, -1
        for end in ends:
            if end >= 0:
                os.close(end)

    # --- inner --------------------------------------------------------------------------------

    def _drain_wakeups(self) -> None:
        """Forget who rang before this step: it sees what they wanted."""
        if self._rung:
            self._rung = False
            try:
                os.read(self._bell, CHUNK)
            except BlockingIOError:
                pass  # it was heard in the last step already

    def _rest(self) -> float:
        """Return for how many seconds there is nothing to do unless something comes."""
        if self._ending:
            return POLL
        seen = replace(self._seen, paused_until=self._paused_until)
        return seconds_until_action(self._clock(), seen, self._limits)

    def _start(self) -> None:
        now = self._clock()
        self._ending = False
        self._buffer = self._words = b""
        self.starts += 1
        try:
            self.worker = WorkerChild([*self._argv, *self.hung.filter_words()], self._env)
        except OSError as fault:
            self.fault = f"the worker does not start: {fault}"
            self._later(now)
            return
        self._child = child = self.worker.process
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ)
        self._seen = WorkerStatus(running=True, since=now)

    def _kill(self) -> None:
        """End a worker that hangs, or is to let go of the driver; leave out the card it is at."""
        if self.worker is None:
            return
        if self.is_paused():
            self._end_worker("paused")
            return
        now, call = self._clock(), self.worker.call()
        fault = f"the driver has not answered for {now - self._seen.since:.0f} s"
        if call is not None and now - call.since >= LONG_CALL * self._limits.frame:
            fault = f"{fault}: {call.name} of GPU {call.card} hangs"
            self._named = call
            self.hung.leave_out(call)
        self._end_worker(fault)

    def _end_worker(self, fault: str) -> None:
        """Kill the worker, and say why."""
        self.fault = fault
        if self.worker is not None:
            self.worker.kill()
        self._close_pipes()
        self._seen = replace(self._seen, killed=self._clock())

    def _abandon(self) -> None:
        """Give up a worker that does not die; start one that leaves its card out, where it can."""
        worker, call = self.worker, self._named
        if worker is not None and call is not None and self.hung.keep_stuck(call.card, worker):
            self.worker = self._child = self._named = None
            self._seen = WorkerStatus()
            return
        self.fault = "the worker hangs in the driver and cannot be killed"
        self._seen = replace(self._seen, abandoned=True)

    def _reap(self) -> None:
        """Notice that the child is over, without waiting for it."""
        if self._child is None or self._child.poll() is None:
            return
        if not self._seen.killed:
            self._leave_crashed_out(self._child.returncode)
        hurry = self._named is not None or (self._seen.killed > 0 and not self.fault)
        self._named = None
        if not self._seen.killed:
            self.fault = self._said() or f"the worker ended with {self._child.returncode}"
        self._close_pipes()
        heard = self._seen.heard
        self.worker = self._child = None
        self._seen = WorkerStatus()
        if hurry:
            self._backoff = FIRST_BACKOFF
            return
        if heard:
            self._backoff = FIRST_BACKOFF
        self._later(self._clock())

    def _leave_crashed_out(self, code: int) -> None:
        """Leave out the card in whose call a worker crashed; one that is out already is no news."""
        call = self.worker.call() if self.worker else None
        if call is None or not (crash := crash_signal(code)):
            return
        if call.card not in self.hung.out():
            self._named = call
        self.hung.leave_out(call, crash)

    def _later(self, now: float) -> None:
        """Put off the next start, each time longer until a worker has sent a frame."""
        self._seen = replace(self._seen, not_before=now + self._backoff)
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)

    def _said(self) -> str:
        """Return the worker's last words, as one line."""
        pipe = self._child.stderr if self._child else None
        if pipe is not None and not pipe.closed:
            try:
                self._words += os.read(pipe.fileno(), WORDS)
            except OSError:
                pass
        text = self._words.decode("utf-8", "replace")
        return "".join(c if c.isprintable() else " " for c in text).strip()[-WORDS:]

    def _close_pipes(self) -> None:
        if self._child is None:
            return
        for pipe in (self._child.stdout, self._child.stderr, self._child.stdin):
            if pipe is None or pipe.closed:
                continue
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            try:
                pipe.close()
            except OSError:
                continue  # a broken pipe: nothing was buffered

    def _receive(self, seconds: float) -> list[Frame]:
        """Wait for output; return every whole frame, oldest first. Garbage ends the worker."""
        frames: list[Frame] = []
        for key, _ in self._selector.select(seconds):
            if key.fd not in self._selector.get_map():
                continue  # garbage in the pipe before it has ended the worker
            try:
                data = os.read(key.fd, CHUNK)
            except BlockingIOError:
                continue
            if key.fd == self._bell:
                continue
            if not data:
                self._ending = True  # _reap says why
                self._selector.unregister(key.fileobj)
            elif self._child and key.fileobj is self._child.stderr:
                self._words = (self._words + data)[-WORDS:]
            else:
                frames += self._frames(data)
        if frames:
            self.fault = ""
            self._seen = replace(self._seen, heard=True, since=self._clock())
        return frames

    def _frames(self, data: bytes) -> list[Frame]:
        """Return the frames that are whole by now; none after garbage."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            if len(self._buffer) > LINE_LIMIT:
                raise FrameError("a frame without end")
            return [decode_frame(line) for line in lines]
        except FrameError as fault:
            self._kill()
            self.fault = str(fault)
            return []
