# SPDX-License-Identifier: Apache-2.0
"""Who is next: by a plan, at random, or by priorities that change a few times (PCT).

Probabilistic concurrency testing (Burckhardt and others, 2010): each actor has a random priority,
the highest that can goes on, and at d - 1 random steps the one at work falls below all others. A
bug that needs d ordered events among n actors of k steps is found with at least 1/(n k^(d-1)).
"""

from __future__ import annotations

import random

from tests.world.kernel import Actor, Kernel, Key, Plan


class Planned:
    """Do what a plan says; elsewhere go on, then let the first go on that can."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def at(self, kernel: Kernel, actor: Actor) -> str:
        del kernel
        return self.plan.get((actor.name, actor.calls, "at"), "")

    def after(self, kernel: Kernel, key: Key, ready: list[Actor]) -> str:
        del kernel, ready
        return self.plan.get(key, "")


class AtRandom(Planned):
    """Let somebody else go on at about one call of `every`."""

    def __init__(self, rng: random.Random, accidents: Plan, every: int) -> None:
        super().__init__(accidents)
        self._random, self._share = rng.random, 1 / every

    def at(self, kernel: Kernel, actor: Actor) -> str:
        if found := super().at(kernel, actor):
            return found
        if self._random() > self._share:
            return ""
        others = [one for one in kernel.actors if one is not actor and one.ready(kernel.now)]
        return others[int(self._random() * len(others))].name if others else ""

    def after(self, kernel: Kernel, key: Key, ready: list[Actor]) -> str:
        del kernel, key
        return ready[int(self._random() * len(ready))].name


class ByPriority(Planned):
    """Probabilistic concurrency testing with `depth` - 1 changes among about `steps` steps."""

    def __init__(self, rng: random.Random, accidents: Plan, depth: int, steps: int) -> None:
        super().__init__(accidents)
        self._random = rng.random
        self._changes = {rng.randrange(1, steps) for _ in range(depth - 1)}
        self._ranks: dict[str, float] = {}
        self._step = 0

    def _rank(self, actor: Actor) -> float:
        if actor.name not in self._ranks:
            self._ranks[actor.name] = 1.0 + self._random()
        return self._ranks[actor.name]

    def at(self, kernel: Kernel, actor: Actor) -> str:
        if found := super().at(kernel, actor):
            return found
        self._step += 1
        if self._step in self._changes:
            self._ranks[actor.name] = -self._step
        mine = self._rank(actor)
        best = max(
            (one for one in kernel.actors if one.ready(kernel.now)), key=self._rank, default=actor
        )
        return best.name if best is not actor and self._rank(best) > mine else ""

    def after(self, kernel: Kernel, key: Key, ready: list[Actor]) -> str:
        del kernel, key
        return max(ready, key=self._rank).name
