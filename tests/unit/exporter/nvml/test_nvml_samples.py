# SPDX-License-Identifier: Apache-2.0
"""Busy and observed seconds from the driver's buffer of samples."""

from __future__ import annotations

import pytest
from gpulock_exporter.nvml.utilisation_samples import (
    DRY,
    HEAL,
    KEPT,
    BusyTime,
    Sample,
    UtilizationSamples,
    integrate_samples,
)

PERIOD = 166_667  # microseconds, as drivers take samples
START = 1_700_000_000_000_000


def buffer(first: int, count: int, percent: float = 50) -> list[Sample]:
    """Return `count` samples from the one after `first` periods on."""
    return [(START + (first + n + 1) * PERIOD, percent) for n in range(count)]


@pytest.mark.parametrize(
    ("samples", "busy", "observed"),
    [
        pytest.param([], 0, 0, id="nothing new"),
        pytest.param([(1_000_000, 100)], 1.0, 1.0, id="one second of work"),
        pytest.param([(500_000, 100), (1_000_000, 0)], 0.5, 1.0, id="half of it"),
        pytest.param([(500_000, 900), (1_000_000, 40)], 0.2, 0.5, id="900 % says nothing"),
        pytest.param([(500_000, -1), (1_000_000, 40)], 0.2, 0.5, id="less than nothing"),
        pytest.param([(0, 100), (1_000_000, 40)], 0.4, 1.0, id="what was seen before"),
        pytest.param([(600_000, 50), (300_000, 50)], 0.3, 0.6, id="time goes back"),
        pytest.param([(600_000, 50), (600_000, 100)], 0.3, 0.6, id="one moment twice"),
        pytest.param([(1_600_000, 100)], 0, 0, id="a gap: nobody looked"),
        pytest.param([(1_600_000, 100), (1_700_000, 100)], 0.1, 0.1, id="after a gap"),
        pytest.param([(10**18, 100), (1_000_000, 10)], 0.1, 1.0, id="from the future"),
        pytest.param([(1_500_000, 40)], 0.6, 1.5, id="the longest"),
        pytest.param([(n * 10_000, 100) for n in range(1, 101)], 1, 1, id="as many as there are"),
        pytest.param([(n * 10_000, 100) for n in range(1, 102)], 0, 0, id="too many"),
    ],
)
def test_a_list_of_samples_is_worth(samples: list[Sample], busy: float, observed: float) -> None:
    found, _ = integrate_samples(samples, seen=0, allowed=2.0)
    assert found == pytest.approx((busy, observed))


def fed(
    source: UtilizationSamples, looks: list[list[Sample]], start: float = 100.0
) -> list[BusyTime]:
    """Look once a second, each time at what a driver has that is younger than was asked for."""
    found: list[BusyTime] = []
    for second, samples in enumerate(looks, 1):
        since = source.since(start + second)
        found.append(source.add([one for one in samples if one[0] > since], start + second))
    return found


def test_a_clock_that_was_set_back_is_found_again() -> None:
    source = UtilizationSamples(100.0)
    fed(source, [buffer(0, 6), buffer(0, 12)])
    later = 100 + 2 + HEAL + 1
    assert source.since(later - 2) != 0
    source.add([], later - 2)
    assert source.since(later) == 0
    assert source.add([(5_000_000, 50)], later) == (0, 0)
    assert source.since(later + 1) == 5_000_000
    assert source.add([(6_000_000, 50)], later + 1) == (0.5, 1.0)


@pytest.mark.parametrize("period", [0.5, 1, 5, 9, 10, 11, 15])
def test_a_period_of_up_to_15_seconds_is_observed_whole(period: float) -> None:
    source, found = UtilizationSamples(100.0), list[BusyTime]()
    for n in range(1, 21):
        now = 100.0 + n * period
        since, youngest = source.since(now), 100 + int(n * period * 1e6 / PERIOD)
        samples = [one for one in buffer(youngest - 99, 99, 40) if one[0] > since]
        found.append(source.add(samples, now))
    assert sum(one.observed for one in found) == pytest.approx(19 * period, rel=0.03)
    assert sum(one.busy for one in found) == pytest.approx(0.4 * 19 * period, rel=0.03)


@pytest.mark.parametrize("period", [0.1, 1, 5, 15])
def test_where_there_never_is_a_buffer_a_snapshot_stands_for_its_period(period: float) -> None:
    source, now, found = UtilizationSamples(100.0), 100.0, list[BusyTime]()
    while now < 100.0 + max(60, 5 * period):
        now += period
        found.append(source.snapshot(50, now))
    observed = sum(one.observed for one in found)
    assert observed == pytest.approx(now - 100.0, abs=DRY + 0.2)
    assert sum(one.busy for one in found) == pytest.approx(observed / 2)


def test_a_card_that_writes_no_samples_while_idle_is_seen_by_snapshots() -> None:
    source = UtilizationSamples(100.0)
    source.since(101)
    source.add(buffer(0, 6), 101)
    assert source.snapshot(0, 101.5) == (0, 0), "its buffer has the word"
    source.since(101 + DRY)
    source.add([], 101 + DRY)
    assert source.snapshot(0, 102 + DRY) == (0, 1)
    assert source.snapshot(50, 103 + DRY) == (0.5, 1)
    assert source.snapshot(900, 104 + DRY) == (0, 0)


def test_a_snapshot_does_not_stand_for_minutes_in_which_a_card_was_lost() -> None:
    source = UtilizationSamples(100.0)
    assert source.snapshot(50, 100 + 600).observed == KEPT
