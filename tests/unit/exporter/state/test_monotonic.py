# SPDX-License-Identifier: Apache-2.0
"""A raw counter made monotonic: what it is given, and what it makes of it."""

from __future__ import annotations

import math

import pytest
from gpulock_exporter.state.device_totals import (
    KIB_WORD,
    KINDS,
    SUMMED,
    WORD,
    CounterKind,
    CounterReading,
    MonotonicCounter,
)
from hypothesis import given
from hypothesis import strategies as st

ENERGY, NVLINK, REASON = KINDS["energy"], KINDS["nvlink_transmit"], KINDS["clock_reason_seconds"]
BOOTED = 100.0  # boottime of the first reading


def grown(*readings: float, kind: CounterKind = ENERGY, seconds: float = 1.0) -> float:
    """Return by how much a counter grows over readings a second apart, the first left out."""
    counter = MonotonicCounter()
    for number, value in enumerate(readings):
        counter.advance(value, BOOTED + number * seconds, kind)
    first = MonotonicCounter()
    first.advance(readings[0], BOOTED, kind)
    return counter.total - first.total


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ((1000, 1300, 1500), 500),
        ((1000, 1000, 1000), 0),
        pytest.param((1000, 9e15, 1300), 300, id="one reading is garbage: nothing is lost"),
        pytest.param((9e15, 1000, 1300, 1600), 1600, id="the first reading is garbage"),
        pytest.param((9e15, 9e15 + 300, 9e15 + 500), 500, id="it counts more than this boot"),
        pytest.param((1000, 9e15, 8e15, 1300), 300, id="two readings are garbage"),
        pytest.param((1000, 9e15, 9e15, 9e15, 1300), 300, id="garbage that is repeated"),
        pytest.param((1e6, 0, 1e6 + 300), 300, id="a reading of 0 is garbage"),
        pytest.param((1e6, 0, 1e6, 1e6), 0, id="a reading of 0 between two of one value"),
        pytest.param((1e6, 50, 350), 350, id="the driver restarts"),
        pytest.param((1e6, 9e9, 9e9 + 300), 300, id="a jump: only what is after it counts"),
        pytest.param((1000, math.nan, math.inf, -1, 1300), 300, id="no numbers"),
    ],
)
def test_energy_grows_by_what_the_board_can_have_taken(
    readings: tuple[float, ...], expected: float
) -> None:
    assert grown(*readings) == expected


def test_errors_that_come_back_after_a_fall_count_once() -> None:
    """Each value is read every five seconds, and handed on with each frame in between."""
    repeated = [value for value in (3, 0, 3, 0, 3) for _ in range(5)]
    assert grown(*repeated, kind=KINDS["ecc"]) == 0
    assert grown(3, *([0] * 15), 2, kind=KINDS["ecc"]) == 2, "the driver was loaded anew"


@pytest.mark.parametrize("width", [WORD, KIB_WORD])
def test_a_counter_that_was_on_its_way_to_the_end_of_its_width_wraps(width: int) -> None:
    stride = width // 8
    readings = [(number * stride) % width for number in range(1, 20)]
    assert grown(*readings, kind=NVLINK) == 18 * stride
    assert KINDS["nvlink_receive"] == NVLINK


def test_a_driver_known_to_be_restarted_has_not_wrapped() -> None:
    near = WORD - (1 << 28)
    counter = MonotonicCounter(0, CounterReading(near, BOOTED, BOOTED))
    assert counter.advance(1 << 20, BOOTED + 1, NVLINK, restarted=True) == 1 << 20
    again = MonotonicCounter(0, CounterReading(near, BOOTED, BOOTED))
    assert again.advance(1 << 20, BOOTED + 1, NVLINK) == (1 << 28) + (1 << 20)


@pytest.mark.parametrize("jump", [20, 3000])
def test_a_counter_that_stood_for_an_hour_does_not_believe_an_hour_at_once(jump: float) -> None:
    counter = MonotonicCounter()
    for second in range(3600):
        counter.advance(5.0, 1e6 + second, REASON)
    before = counter.total
    assert counter.advance(5.0 + jump, 1e6 + 3600, REASON) == 0
    assert counter.advance(5.0 + 3, 1e6 + 3601, REASON) == 3
    assert counter.total == before + 3


def test_what_was_counted_in_this_boot_counts_from_the_first_reading_unless_it_wraps() -> None:
    kinds = {**KINDS, "summed": SUMMED}
    counters = {name: MonotonicCounter() for name in kinds}
    grown = [one.advance(50, BOOTED, kinds[name]) for name, one in counters.items()]
    assert not any(grown), "nobody is billed for it"
    whole = {name for name, one in counters.items() if one.total == 50}
    assert kinds.keys() - whole == {
        *("pcie_transmit", "pcie_receive", "nvlink_transmit", "nvlink_receive", "summed")
    }


def test_whole_numbers_stay_whole() -> None:
    counter = MonotonicCounter()
    for number, value in enumerate((2**60, 2**60 + 1, 2**60 + 3)):
        counter.advance(value, BOOTED + number, NVLINK)
    assert (counter.total, type(counter.total)) == (3, int)


GARBAGE = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, WORD - 1, WORD, KIB_WORD, 2**64 - 1]),
)


@given(st.sampled_from(sorted(KINDS)), st.lists(st.tuples(GARBAGE, st.floats(0, 1e4)), max_size=40))
def test_no_readings_make_a_counter_fall_or_run_faster_than_it_can(
    name: str, readings: list[tuple[float, float]]
) -> None:
    kind, counter, at = KINDS[name], MonotonicCounter(), BOOTED
    total, begun = 0.0, None
    for value, seconds in readings:
        at += seconds
        step_ = counter.advance(value, at, kind)
        if begun is None and counter.last is not None:
            begun = (at, counter.total)
        assert step_ >= 0
        assert counter.total >= total
        total = counter.total
    if begun is not None:
        # each step has a second of slack
        room = kind.fastest * (at - begun[0] + len(readings))
        assert total - begun[1] <= room * 1.001
