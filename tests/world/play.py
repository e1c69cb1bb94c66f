# SPDX-License-Identifier: Apache-2.0
"""What the tests play of a cast: schedules at random, something at each call, a planted fault."""

from __future__ import annotations

import pytest

from tests.world.actors import Cast
from tests.world.budget import AT_CALLS, seeds, shuffled, some
from tests.world.choosers import Planned
from tests.world.counts import SCHEDULES
from tests.world.explore import Explorer
from tests.world.site import Site

MOST = 300  # schedules until a planted fault is found
FAILED = ("a program failed", "an actor failed")  # what was planted is broken itself


def sample_schedules(site: Site, cast: Cast, part: float) -> None:
    """Play this part of the schedules at random."""
    explorer = Explorer(site, cast)
    for seed in seeds(part):
        explorer.sample(seed)


def check_each_call(site: Site, cast: Cast, actor: str, what: str, part: float) -> None:
    """Let something happen at calls of an actor, in this part of the schedules."""
    explorer = Explorer(site, cast)
    named = f"at a call {what}" if what[0] == "(" else "accident"
    plans = explorer.each_call(actor, what)
    assert plans, f"{actor} has no call at which {what} can be"
    for plan in some(shuffled(plans), AT_CALLS * part):
        explorer.check(Planned(plan), named)


def find_planted_fault(site: Site, cast: Cast, *, one: str = "", other: str = "") -> None:
    """Fail unless a schedule breaks a promise; first those in which `other` acts within `one`."""
    explorer = Explorer(site, cast)
    for plan in explorer.each_call(one, other) if one else ():
        if found := explorer.play(Planned(plan)):
            assert not found.startswith(FAILED), found
            SCHEDULES["of planted faults"] += 1
            return
    for seed in range(1, MOST):
        if found := explorer.play(explorer.drawn(seed)[0], seed):
            assert not found.startswith(FAILED), found
            SCHEDULES["of planted faults"] += seed
            return
    pytest.fail(f"no promise was broken in {MOST} schedules")
