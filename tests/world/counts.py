# SPDX-License-Identifier: Apache-2.0
"""How many schedules were played, by how they were chosen."""

from __future__ import annotations

from collections import Counter

from tests.support.seeds import chosen_seed

SCHEDULES: Counter[str] = Counter()


def world_lines() -> list[str]:
    """Return the summary: a world in which nothing happened proves nothing."""
    count = sum(SCHEDULES.values())
    if not count:
        return []
    parts = ", ".join(f"{number} {how}" for how, number in sorted(SCHEDULES.items()))
    seed = chosen_seed("GPULOCK_WORLD_SEED")
    return [f"world: {count} schedules from SEED={seed} ({parts})"]
