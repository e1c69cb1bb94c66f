# SPDX-License-Identifier: Apache-2.0
"""Use over time in 64 buckets, however long a claim lasts."""

from __future__ import annotations

import math

import pytest
from gpulock_exporter.state.claim_accounting import Buckets, restore_buckets

from gpulock.node.sample import BUCKETS


def filled(seconds: int, use: float = 0.5) -> Buckets:
    """Return the buckets of a claim that was looked at each second."""
    buckets = Buckets(100.0)
    for second in range(1, seconds + 1):
        buckets.add(100.0 + second, use, 1.0)
    return buckets


@pytest.mark.parametrize(
    ("seconds", "width", "count"),
    [(64, 1, 64), (65, 2, 33), (1000, 16, 63)],
)
def test_the_width_doubles_when_all_are_full(seconds: int, width: float, count: int) -> None:
    buckets = filled(seconds)
    assert (buckets.width, len(buckets.used)) == (width, count)
    assert sum(buckets.covered) == pytest.approx(seconds)
    assert buckets.used == pytest.approx([one / 2 for one in buckets.covered])


def test_a_look_at_several_seconds_is_spread_over_their_buckets() -> None:
    buckets = Buckets(0.0)
    buckets.add(3.5, 1.5, 3.0)
    assert buckets.used == pytest.approx([0.25, 0.5, 0.5, 0.25])
    assert buckets.covered == pytest.approx([0.5, 1.0, 1.0, 0.5])


@pytest.mark.parametrize("at", [-1e9, 0.0, 1e300, math.inf])
def test_a_time_that_cannot_be_does_no_harm(at: float) -> None:
    buckets = Buckets(0.0)
    buckets.add(at, 0.5, 1.0)
    assert len(buckets.used) <= BUCKETS
    assert sum(buckets.used) == pytest.approx(0.5)


@pytest.mark.parametrize("width", [None, 0.0, -1.0, 1e300])
def test_an_invalid_width_starts_empty_buckets(width: float | None) -> None:
    assert restore_buckets(5.0, width, (1,), (1,)) == Buckets(5.0)


def test_more_use_than_was_observed_is_cut() -> None:
    assert restore_buckets(0.0, 1.0, (5000, 1), (1000,) * 100).used == [1.0, 0.001]
