# SPDX-License-Identifier: Apache-2.0
"""Play schedules until one fails; then find the shortest that does, and print who did what."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.world.actors import Cast
from tests.world.choosers import AtRandom, ByPriority, Planned
from tests.world.counts import SCHEDULES
from tests.world.kernel import FREEZE, KILL, Chooser, Plan, Violation
from tests.world.site import Site


class WorldError(AssertionError):
    """Say what does not hold, with the shortest schedule that shows it."""


class Explorer:
    """Schedules of one cast on one site."""

    def __init__(self, site: Site, cast: Cast) -> None:
        self.site, self.cast = site, cast
        self.plan: Plan = {}  # the shortest that failed

    def play(self, chooser: Chooser, seed: int = 0, cast: Cast | None = None) -> str:
        """Play one schedule; return what does not hold, nothing where all does."""
        site = self.site
        site.reset(seed, fresh=seed % 4 == 3)
        try:
            site.kernel.run((cast or self.cast).actors(site), chooser)
            site.finish()
        except Violation as found:
            return str(found)
        except Exception as fault:
            return f"an actor failed: {type(fault).__name__}: {fault}"
        return ""

    def check(self, chooser: Chooser, kind: str, seed: int = 0) -> None:
        """Play one schedule; raise WorldError with the shortest one that fails as well."""
        found = self.play(chooser, seed)
        SCHEDULES[kind] += 1
        if found:
            raise WorldError(self.explain(seed))

    def explain(self, seed: int) -> str:
        """Return the shortest schedule that fails as the one that was just played, as a table."""
        plan, cast = dict(self.site.kernel.made), self.cast
        found = self.play(Planned(plan), seed)
        if not found:
            return f"seed {seed} fails, but not when it is played again"
        for name in list(cast.plays):
            less = cast.without(name)
            if less.plays and self.play(Planned(plan), seed, less):
                cast = less
        size = len(plan)
        while size:  # whole parts first: a random schedule has hundreds of choices
            for begin in range(0, len(plan), size):
                gone = list(plan)[begin : begin + size]
                less_plan = {key: what for key, what in plan.items() if key not in gone}
                if self.play(Planned(less_plan), seed, cast):
                    plan = less_plan
                    break
            else:
                size //= 2
            size = min(size, len(plan))
        found, self.plan = self.play(Planned(plan), seed, cast), plan
        return "\n".join([f"{found} (seed {seed})", *self.table(), f"plan: {plan}"])

    def table(self) -> list[str]:
        """Return who did what, one line a call; what an actor only reads is counted."""
        lines: list[str] = []
        reads = 0
        trace = self.site.kernel.trace
        root = f"{self.site.root}/"
        for number, (name, call, what, path, fault) in enumerate(trace):
            follows = trace[number + 1] if number + 1 < len(trace) else [""]
            if what in READS and follows[0] == name:
                reads += 1
                continue
            more = f" (after {reads} reads)" if reads else ""
            reads = 0
            where = path.replace(root, "")
            lines.append(f"{name:>12} {call:>4}  {what:12} {where} {fault}{more}".rstrip())
        return lines

    # --- which schedules ------------------------------------------------------------------------

    def drawn(self, seed: int, steps: int = 250) -> tuple[Chooser, str]:
        """Return who chooses by a seed: at random or by priorities, perhaps with an accident."""
        rng = random.Random(seed)
        plan: Plan = {}
        if rng.random() < 0.7:
            name = rng.choice(list(self.cast.plays))
            plan[name, rng.randrange(1, steps // 2), "at"] = rng.choice((KILL, KILL, FREEZE))
        if rng.random() < 0.5:
            return AtRandom(rng, plan, rng.choice((3, 10, 40))), "at random"
        return ByPriority(rng, plan, rng.randrange(2, 6), steps), "by priorities"

    def sample(self, seed: int) -> None:
        """Play the schedule of a seed; raise WorldError."""
        self.check(*self.drawn(seed), seed)

    def each_call(self, name: str, what: str) -> list[Plan]:
        """Return the plans in which something happens at each call of an actor.

        Both where the cast's first actor begins, and where this one does.
        """
        begins = dict.fromkeys((next(iter(self.cast.plays)), name))
        starts: list[Plan] = [{("", 0, "next"): first} for first in begins]
        return [
            {**start, (name, at, "at"): what}
            for start in starts
            for at in self.calls(name, start, what)
        ]

    def calls(self, name: str, plan: Plan, other: str = "") -> list[int]:
        """Return the numbers of the calls of an actor that others can tell, under a plan.

        What it does to a file that it alone knows as yet, they cannot. Of an `other` that acts,
        those before it has ended.
        """
        self.play(Planned(plan))
        trace = self.site.kernel.trace
        last = [number for number, line in enumerate(trace) if line[0] == other][-1:]
        return [
            int(call)
            for who, call, what, path, _ in trace[: last[0] if last else None]
            if who == name and (what not in PRIVATE or not path.rpartition("/")[2].startswith("."))
        ]

    def preempted(self, first: str, second: str, rng: random.Random | None) -> Iterator[Plan]:
        """Yield every plan with up to two preemptions in which `first` begins.

        With `rng` random ones of them, without an end.
        """
        start: Plan = {("", 0, "next"): first}
        places = self.calls(first, start)
        if rng is None:
            yield start
        for at in places if rng is None else endless(rng, places):
            once = {**start, (first, at, "at"): second}
            backs = self.calls(second, once)
            if rng is None:
                yield once
            for back in backs if rng is None else [rng.choice(backs)]:
                yield {**once, (second, back, "at"): first}


def endless(rng: random.Random, numbers: list[int]) -> Iterator[int]:
    """Yield some of these numbers again and again."""
    while True:
        yield rng.choice(numbers)


PRIVATE = ("create", "write", "fchmod", "fchown", "fsync")
READS = ("stat", "lstat", "listdir", "readlink", "open", "read", "fchmod")
