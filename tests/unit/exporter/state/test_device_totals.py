# SPDX-License-Identifier: Apache-2.0
"""What a device did in this boot, and a raw counter made monotonic, whatever the frames say.

A card keeps its number for the boot: series and tiles of others do not change when one goes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.collector_state import ExporterMemory
from gpulock_exporter.state.device_totals import (
    KEPT_CREDIT,
    KIB_WORD,
    KINDS,
    LONGEST_LOOK,
    SUMMED,
    WORD,
    CounterKind,
    DeviceTotals,
    MonotonicCounter,
    TelemetryTotals,
)
from hypothesis import given
from hypothesis import strategies as st

from gpulock.node.devices import Device
from tests.support.exporter_nodes import Node, card, instance, listed
from tests.support.trees import bus


def played(*looks: DeviceTelemetry, seconds: float = 1.0) -> DeviceTotals:
    """Return the counters of a card after looks a second apart."""
    node = Node()
    for look in looks:
        node.tick(look, seconds=seconds)
    return of(node)


def of(node: Node, number: int = 0) -> DeviceTotals:
    found = node.book.memory.totals.devices.get(bus(number))
    assert found is not None
    return found


def use(busy: float | None, observed: float | None, **changes: Any) -> DeviceTelemetry:
    return card(busy=busy, observed=observed, **changes)


@pytest.mark.parametrize(
    ("busy", "observed", "expected"),
    [
        pytest.param(9.0, 1.0, (1.0, 1.0), id="900 %"),
        pytest.param(50.0, 100.0, (3.0, 6.0), id="more than has passed"),
        pytest.param(math.nan, 1.0, (0.0, 0.0), id="no number"),
        pytest.param(1.0, math.inf, (0.0, 0.0), id="for ever"),
        pytest.param(None, 1.0, (0.0, 0.0), id="not told"),
        pytest.param(1.0, None, (0.0, 0.0), id="not observed"),
    ],
)
def test_a_look_counts_for_no_more_than_it_can_have_seen(
    busy: float | None, observed: float | None, expected: tuple[float, float]
) -> None:
    # seconds without a word leave room for what the buffer of the driver remembers, and no more
    node = Node()
    for look in (use(0, 1), *[use(0, 0)] * 9):
        node.tick(look)
    node.tick(use(busy, observed))
    totals = of(node)
    assert (totals.busy, totals.observed) == expected


def test_no_driver_remembers_a_night() -> None:
    assert played(use(0, 0), use(400, 400), seconds=600).observed == LONGEST_LOOK


@pytest.mark.parametrize(("seen", "more"), [(1.0, 1.0), (0.5, KEPT_CREDIT + 1.0)])
def test_time_is_not_counted_twice_when_a_new_worker_reads_the_buffer(
    seen: float, more: float
) -> None:
    """What was not seen is not saved up for that, but for some seconds."""
    node = Node()
    for _ in range(60):
        node.tick(use(seen / 2, seen))
    before = of(node).observed
    node.tick(use(8.0, 16.0))
    assert of(node).observed == before + more


def test_an_instance_that_is_gone_is_forgotten_after_a_while_and_a_card_is_not() -> None:
    node = Node()
    node.tick(use(0.5, 1.0), card(1, mig=True), instance(1, 1))
    for seconds in (60, 70):
        node.tick(card(1, mig=True), seconds=seconds)
    assert sorted(node.book.memory.totals.devices) == [bus(0), bus(1)]


@pytest.mark.parametrize(
    ("energy", "driver"), [(9e5, "2"), (10.0, "1")], ids=["another driver", "energy falls"]
)
def test_a_driver_that_was_restarted_has_not_wrapped(energy: float, driver: str) -> None:
    node, near = Node(), (1 << 32) - 1000
    looks = ((9e5, near - 900, "1"), (9e5, near, "1"), (energy, 500, driver))
    for joules, value, version in looks:
        node.now += 1
        frame = node.frame(card(energy=joules, nvlink_transmit=value), driver=version)
        node.take(frame)
    assert of(node).counters["nvlink_transmit"].total == 900 + 500


def test_a_card_goes_by_its_uuid_once_that_is_known() -> None:
    node = Node()
    for name in ("", "", "GPU-a", "GPU-a", "", "GPU-????"):
        node.tick(use(0.5, 1.0, uuid=name))
    assert (of(node).uuid, of(node).observed) == ("GPU-a", 5.0)
    for _ in range(2):
        node.tick(use(0.5, 1.0, uuid="GPU-b"))
    assert (of(node).uuid, of(node).busy) == ("GPU-b", 0.5)


@pytest.mark.parametrize("told", [math.nan, -1e9, 0.0, 1e18, math.inf])
def test_a_frame_that_does_not_know_the_time_is_of_now(told: float) -> None:
    node = Node()
    node.tick(use(0.5, 1.0))
    node.now += 1
    frame = node.frame(use(0.5, 1.0))
    frame.boottime = told
    node.take(frame)
    node.tick(use(0.5, 1.0))
    assert (of(node).looked, of(node).observed) == (node.now, 2.0)


def test_sums_of_a_new_worker_restart_and_are_no_wrap() -> None:
    near = (1 << 32) - 1000
    for summed, total in ((True, near + 500), (False, near + 1500)):
        sent = (0, near, 500)
        totals = played(*(card(nvlink_transmit=n, nvlink_summed=summed) for n in sent))
        assert totals.counters["nvlink_transmit"].total == total


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
        pytest.param((1000, 9e15, 1300), 300, id="one reading is garbage: nothing is lost"),
        pytest.param((9e15, 1000, 1300, 1600), 1600, id="the first reading is garbage"),
        pytest.param((9e15, 9e15 + 300, 9e15 + 500), 500, id="it counts more than this boot"),
        pytest.param((1000, 9e15, 9e15, 9e15, 1300), 300, id="garbage that is repeated"),
        pytest.param((1e6, 0, 1e6 + 300), 300, id="a reading of 0 is garbage"),
        pytest.param((1e6, 0, 1e6, 1e6), 0, id="a reading of 0 between two of one value"),
        pytest.param((1e6, 50, 350), 350, id="the driver restarts"),
        pytest.param((1e6, 9e9, 9e9 + 300), 300, id="a jump: only what is after it counts"),
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
    assert grown(2 * 2**20, 4 * 2**20, 2**20, kind=NVLINK) == 3 * 2**20, "far from its end: anew"


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


GARBAGE = st.one_of(  # a frame has no other numbers
    st.floats(0, allow_infinity=False),
    st.integers(0, 2**70),
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


def shifted(number: int, index: int) -> Device:
    """Return a card in the driver's list, where those behind a card that is gone move up."""
    found = listed(number)
    found.index = index
    return found


def looked(number: int, index: int) -> DeviceTelemetry:
    return card(number, index=index)


def labels(node: Node, *found: Device) -> dict[str, str]:
    """Return the label of each device by the number of its bus."""
    return {one.id: one.gpu_label for one in node.snapshot(found).devices}


def test_a_card_that_comes_later_gets_the_lowest_number_that_is_free_and_keeps_it() -> None:
    node = Node(gpus=4)
    node.tick(looked(0, 0), looked(2, 1), looked(3, 2))
    node.snapshot([shifted(0, 0), shifted(2, 1), shifted(3, 2)])
    node.tick(*(card(n) for n in range(4)))
    found = labels(node, *(listed(n) for n in range(4)))
    assert found == {bus(0): "0", bus(1): "3", bus(2): "1", bus(3): "2"}
    after = Node(ExporterMemory(TelemetryTotals(node.book.memory.totals.devices)))
    after.now = node.now
    after.tick(looked(0, 0), looked(1, 1))
    assert labels(after, shifted(0, 0), shifted(1, 1))[bus(1)] == "3", "over a restart"


def test_an_instance_has_the_number_of_its_card() -> None:
    node = Node()
    node.tick(card(0), card(1, mig=True), instance(1, 2))
    node.snapshot([listed(0), listed(1, "gi2.ci0")])
    node.tick(looked(1, 0), instance(1, 2, index=0))
    part = shifted(1, 0)
    part.id = f"{bus(1)}.gi2.ci0"
    assert labels(node, part)[part.id] == "1:gi2.ci0"


def test_a_card_that_cuda_does_not_count_has_no_number() -> None:
    node = Node()
    node.tick(card(0))
    assert labels(node, shifted(0, -1)) == {bus(0): ""}
    node.snapshot([listed(0)])
    assert labels(node, shifted(0, -1)) == {bus(0): ""}, "whatever it had before"
