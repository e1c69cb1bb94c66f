# SPDX-License-Identifier: Apache-2.0
"""What a device did in this boot, whatever the frames say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.device_totals import KEPT_CREDIT, LONGEST_LOOK, DeviceTotals

from tests.support.exporter_nodes import Node, card, instance
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
        pytest.param(-1.0, 1.0, (0.0, 0.0), id="below 0"),
        pytest.param(None, 1.0, (0.0, 0.0), id="not told"),
        pytest.param(1.0, None, (0.0, 0.0), id="not observed"),
        pytest.param(0.0, 0.0, (0.0, 0.0), id="no new samples"),
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


def test_when_it_was_last_at_work_is_told_and_a_desktop_is_no_work() -> None:
    node = Node()
    for busy in (0, 0.5, 0.005, 0):
        node.tick(use(busy, 1.0))
    assert of(node).last_busy == node.now - 2


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
        node.book.tick([frame], node.facts, node.moment)
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
    node.book.tick([frame], node.facts, node.moment)
    node.tick(use(0.5, 1.0))
    assert (of(node).looked, of(node).observed) == (node.now, 2.0)


def test_sums_of_a_new_worker_restart_and_are_no_wrap() -> None:
    near = (1 << 32) - 1000
    for summed, total in ((True, near + 500), (False, near + 1500)):
        sent = (0, near, 500)
        totals = played(*(card(nvlink_transmit=n, nvlink_summed=summed) for n in sent))
        assert totals.counters["nvlink_transmit"].total == total
