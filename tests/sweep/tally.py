# SPDX-License-Identifier: Apache-2.0
"""How many points a sweep tried, per case and kind of fault."""

from __future__ import annotations

import os
from collections import Counter
from functools import cached_property

from tests.support.seeds import chosen_seed

EVERY = 48  # of the points, in the sampled form: a minute on two idle cores
WHOLE = os.environ.get("GPULOCK_SOAK") == "1" or os.environ.get("FULL") == "1"
NEARER = 12  # so much oftener are calls on what a hook may change


class Tally:
    """Counts of points that exist, were tried, and were not reached."""

    def __init__(self) -> None:
        self.there: Counter[tuple[str, str]] = Counter()
        self.tried: Counter[tuple[str, str]] = Counter()
        self.missed: Counter[tuple[str, str]] = Counter()
        self._order: Counter[tuple[str, str, bool]] = Counter()
        self.every = 1 if WHOLE else int(os.environ.get("GPULOCK_SWEEP_SAMPLE", EVERY))

    @cached_property
    def seed(self) -> int:
        """Return which points are tried: others at each commit, the same in each run of one."""
        return chosen_seed("GPULOCK_SWEEP_SEED")

    def is_drawn(self, case: str, kind: str, near: bool, thin: int = 1) -> bool:
        """Count one more point that exists; return whether the sample has it.

        `near` are the calls on locks, state and spool: more of them are tried. Of a case that is
        `thin` fewer are, but in a whole sweep; of one whose `thin` is 0 all.
        """
        self.there[case, kind] += 1
        self._order[case, kind, near] += 1
        sampled = self.every * thin if self.every > 1 else 1
        every = max(1, sampled // NEARER) if near else max(1, sampled)
        return self._order[case, kind, near] % every == self.seed % every

    def lines(self) -> list[str]:
        """Return the summary."""
        if not self.there:
            return []
        found = [f"sweep: every {self.every}. point, GPULOCK_SWEEP_SEED={self.seed}"]
        for (case, kind), there in sorted(self.there.items()):
            tried, missed = self.tried[case, kind], self.missed[case, kind]
            found.append(
                f"  {case:30} {kind:7} {tried:5} of {there:5} points tried, {missed} not reached"
            )
        found.append(f"  in all {sum(self.tried.values())} of {sum(self.there.values())} points")
        return found


TALLY = Tally()
