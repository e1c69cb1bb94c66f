# SPDX-License-Identifier: Apache-2.0
"""The kernel of the world: every system call of an actor is one step, and a chooser says whose.

Files are real. Processes, clocks and random bytes are the world's own. An actor is a greenlet; it
goes on until the chooser wants another one, kills its program at a call, or freezes it there until
no other can go on.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Protocol

from greenlet import getcurrent, greenlet

from tests.world.processes import TICKS, Process, ProcTree

TICK = 0.00002  # seconds that a call takes
VIRTUAL = 10_000_000  # the first descriptor of a file of /proc
STEPS = 200_000  # of a schedule: more are a livelock
KILL, FREEZE = "(kill)", "(freeze)"

Key = tuple[str, int, str]  # an actor, the number of its call, and "at" it or "next" after it
Plan = dict[Key, str]  # what is done there: another actor's name, KILL or FREEZE


def boot_id(rng: random.Random) -> str:
    """Return the id of a boot."""
    return str(uuid.UUID(int=rng.getrandbits(128)))


class Killed(BaseException):
    """End the program that is at work in an actor, as SIGKILL does: nothing of it runs any more."""


class Violation(BaseException):
    """Say which invariant does not hold."""


class Actor:
    """One who acts: `play` is a greenlet's, `process` the program that is at work in it."""

    def __init__(self, name: str, play: Callable[[], object]) -> None:
        self.name = name
        self.task = greenlet(play)
        self.calls = 0
        self.wake = 0.0
        self.until: Callable[[], object] | None = None
        self.frozen = self.doomed = self.gone = self.begun = False
        self.process: Process | None = None

    def ready(self, now: float) -> bool:
        """Return whether it can go on."""
        if self.task.dead:
            return False
        if self.doomed:
            return True
        if self.frozen or self.wake > now:
            return False
        return self.until is None or bool(self.until())


class Chooser(Protocol):
    """Who is next: `at` a call of an actor that could go on, and `after` one that cannot."""

    def at(self, kernel: Kernel, actor: Actor) -> str: ...
    def after(self, kernel: Kernel, key: Key, ready: list[Actor]) -> str: ...


class Kernel:
    """One machine. `moving` are the folders whose files change; `made` are the choices so far."""

    def __init__(
        self, moving: tuple[str, ...], watched: tuple[str, ...], check: Callable[[], None]
    ) -> None:
        self.moving, self.watched, self._check = moving, watched, check
        self.actor: Actor | None = None
        self.reset(random.Random(0))

    def reset(self, rng: random.Random) -> None:
        """Begin anew, with these random bytes."""
        self.rng, self.now, self.wall = rng, 1000.0, time.time() - 1000.0
        self.tree = ProcTree(boot_id(rng), lambda: int(self.now * TICKS))
        self.files: dict[int, tuple[str, Process | None]] = {}
        self.shown: dict[int, tuple[str, Process | None, Callable[[], bytes], list[bytes]]] = {}
        self._last = VIRTUAL
        self.locked: set[int] = set()
        self.full: tuple[str, ...] = ()
        self.actors: list[Actor] = []
        self.trace: list[list[str]] = []
        self.made: Plan = {}
        self.chooser: Chooser | None = None
        self.dirty = False

    def boot(self) -> None:
        """Let the clocks since boot begin anew; the wall clock goes on."""
        self.wall += self.now - 40.0
        self.now = 40.0
        self.tree = ProcTree(boot_id(self.rng), lambda: int(self.now * TICKS))

    # --- actors -------------------------------------------------------------------------------

    def run(self, actors: Iterable[Actor], chooser: Chooser) -> None:
        """Let the actors act until nobody can; raise Violation."""
        self._hub = getcurrent()
        self.actors, self.chooser = [*self.actors, *actors], chooser
        key: Key = ("", 0, "next")
        try:
            while ready := self._ready():
                at = chooser.after(self, key, ready) if len(ready) > 1 else ""
                chosen = next((one for one in ready if one.name == at), ready[0])
                if chosen is not ready[0]:
                    self.made[key] = at
                self._resume(chosen).switch()
                last = self.actor
                self.actor = None
                if last is not None:
                    key = (last.name, last.calls + last.task.dead, "next")
                self._check_if_dirty()
        finally:
            self.actor = None
            for actor in self.actors:
                actor.doomed = actor.gone = True
                if actor.begun and not actor.task.dead:
                    self.actor = actor
                    try:
                        actor.task.throw(Killed)
                    except (Killed, Violation):
                        pass
            self.actor = None

    def _ready(self) -> list[Actor]:
        while True:
            ready = [one for one in self.actors if one.ready(self.now)]
            if ready:
                return ready
            asleep = [
                one.wake
                for one in self.actors
                if one.wake > self.now and not (one.frozen or one.task.dead)
            ]
            frozen = [one for one in self.actors if one.frozen and not one.task.dead]
            if asleep:
                self.now = min(asleep)
            elif frozen:
                frozen[0].frozen = False
            else:
                return []

    def _resume(self, actor: Actor) -> greenlet:
        self.actor, actor.begun = actor, True
        return actor.task

    def step(self, name: str, path: str = "") -> list[str]:
        """Do one step of the actor that is at work; return its line of the trace."""
        actor = self.actor
        if actor is None or self.chooser is None:  # nobody else is there
            return ["", "", name, path, ""]
        if actor.doomed:
            raise Killed
        self._check_if_dirty()
        actor.calls += 1
        self.now += TICK
        if len(self.trace) > STEPS:
            raise Violation("nobody gets anywhere")
        if wanted := self.chooser.at(self, actor):
            self._turn(actor, wanted)
        line = [actor.name, str(actor.calls), name, path, ""]
        self.trace.append(line)
        return line

    def _turn(self, actor: Actor, wanted: str) -> None:
        key: Key = (actor.name, actor.calls, "at")
        if wanted == KILL:
            if actor.process is None:
                return
            self.made[key] = wanted
            self.trace.append([actor.name, str(actor.calls), "is killed", "", ""])
            self.kill(actor.process)
        elif wanted == FREEZE:
            self.made[key] = wanted
            self.trace.append([actor.name, str(actor.calls), "is stopped", "", ""])
            actor.frozen = True
            self._leave(actor)
        else:
            for other in self.actors:
                if other.name == wanted and other is not actor and other.ready(self.now):
                    self.made[key] = wanted
                    self._resume(other).switch()
                    break
        if actor.doomed:
            raise Killed

    def _leave(self, actor: Actor) -> None:
        """Let others go on; come back when the main loop wants this actor again."""
        self._hub.switch()
        if actor.doomed:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Let time go by for the actor at work."""
        actor = self.actor
        if actor is None:
            self.now += seconds
            return
        self.step("sleep", f"{seconds:g}")
        actor.wake = self.now + seconds
        self._leave(actor)

    def wait(self, until: Callable[[], object], what: str) -> None:
        """Wait for something that another actor brings about."""
        actor = self.actor
        assert actor is not None
        if not until():
            actor.until = until
            self._leave(actor)
            actor.until = None
        self.step("sees", what)

    def kill(self, process: Process) -> None:
        """Kill a process, and with it the program in whichever actor plays it."""
        for actor in self.actors:
            if actor.process is process:
                actor.doomed = True
        self._close_all(process)
        self.tree.end(process)

    def program(self, process: Process, main: Callable[[], int | None]) -> int | None:
        """Run a program as a process; return its exit code, None where it was killed."""
        actor = self.actor
        assert actor is not None
        actor.process = process
        try:
            return main()
        except Killed:
            if actor.gone:
                raise
            return None
        finally:
            self._close_all(process)
            self.tree.end(process)
            actor.process = None
            actor.doomed = actor.gone

    def _close_all(self, process: Process) -> None:
        for fd in process.files:
            self.locked.discard(fd)
            self.forget(fd)
        process.files.clear()

    def forget(self, fd: int) -> None:
        """Close a file, if it is open."""
        self.shown.pop(fd, None)
        if self.files.pop(fd, None) and fd < VIRTUAL:
            os.close(fd)

    def _check_if_dirty(self) -> None:
        if self.dirty:
            self.dirty = False
            self._check()
