# SPDX-License-Identifier: Apache-2.0
"""Shares: several jobs on a card, and never more than it has places."""

from __future__ import annotations

from typing import Final

import pytest

from gpulock.node.devices import SHARE
from tests.labs.both.sge_site import SHARES, SgeSite
from tests.labs.both.site import SLEEP

pytestmark = [pytest.mark.lab, pytest.mark.sge]
PLACES: Final = 4  # on each card
SHOW: Final = 'echo "$CUDA_VISIBLE_DEVICES has $GPULOCK_SHARE"\n'


def cards(site: SgeSite, job: int) -> set[str]:
    """Return the cards on which a job has something."""
    return {name.partition(SHARE)[0] for name in site.held(job)}


def start_share(site: SgeSite, places: int, user: str) -> int:
    """Start a job of places; return it once it knows its part."""
    job = site.submit(places, SHOW + SLEEP, user=user, kind=SHARES)
    site.wait_running(job)
    site.wait_said(job, f"has {places}/{PLACES}")
    return job


def test_jobs_of_a_user_share_a_card_and_one_that_dies_disturbs_no_neighbour(
    sge_site: SgeSite,
) -> None:
    site = sge_site
    with site.shared(range(site.count)[-2:]):
        one, two = (start_share(site, 1, site.alice) for _ in range(2))
        other = start_share(site, 2, site.bob)
        assert cards(site, one) == cards(site, two) != cards(site, other)
        site.kill(one)
        site.conclude(one)
        site.reap()
        assert (site.held(one), len(site.held(two)), len(site.held(other))) == ([], 1, 2)
        whole = site.start(site.count - 2)
        assert not cards(site, whole) & (cards(site, two) | cards(site, other))
