# SPDX-License-Identifier: Apache-2.0
"""What a claim is billed for: from its first look on, to its last second, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.claim_accounting import Buckets, LedgerAccount, restore_buckets

from gpulock.node.sample import BUCKETS
from gpulock.store.locks import Lock
from tests.support.exporter_nodes import GIB, Node, card, facts, lock
from tests.support.trees import bus

A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"


def held(node: Node, *locks: Lock) -> None:
    node.facts = facts(*locks)


def account(node: Node, token: str = A, number: int = 0) -> LedgerAccount:
    found = node.book.memory.ledger.of(bus(number), token)
    assert found is not None
    return found


def working(busy: float = 0.5, **changes: Any) -> DeviceTelemetry:
    return card(busy=busy, observed=1.0, **changes)


def worked() -> Node:
    """Return a node whose first claim was seen at work for half of a second, and then again."""
    node = Node()
    held(node, lock(0, A))
    node.tick(working())
    node.tick(working())
    return node


def test_a_claim_that_follows_at_once_is_not_billed_for_the_one_before() -> None:
    node = worked()
    held(node, lock(0, B))
    over = node.tick(working(1.0))
    assert over[A][bus(0)].busy == 1.5
    assert account(node, B).busy == 0.0
    node.tick(working(0.125))
    assert account(node, B).busy == 0.125


def test_after_a_long_silence_only_who_held_before_and_after_is_billed() -> None:
    node = Node()
    held(node, lock(0, A), lock(1, B))
    for _ in range(2):
        node.tick(card(0, energy=100.0), card(1, energy=100.0))
    held(node, lock(0, A), lock(1, "c" * 16))
    over = node.tick(card(0, energy=9100.0), card(1, energy=9100.0), seconds=60)
    assert account(node).energy == 9000.0
    assert over[B][bus(1)].energy == 0.0
    assert account(node, "c" * 16, 1).energy is None


def test_a_claim_that_goes_while_the_driver_hangs_waits_for_its_last_look() -> None:
    node = worked()
    held(node)
    assert node.silence() == {}
    assert node.silence() == {}
    over = node.tick(card(busy=1.5, observed=3.0))
    assert over[A][bus(0)].busy == 2.0


def test_a_claim_is_finished_though_the_driver_says_nothing_any_more() -> None:
    node = worked()
    held(node)
    for _ in range(10):
        node.silence()
    assert node.over[A][bus(0)].busy == 0.5


def test_a_claim_that_comes_while_the_driver_hangs_is_not_billed_for_the_hang() -> None:
    node = Node()
    node.tick(working(energy=100.0))
    held(node, lock(0, A))
    node.silence()
    node.silence()
    node.tick(card(busy=3.0, observed=3.0, energy=900.0))
    assert (account(node).busy, account(node).energy) == (0.0, None)


def test_energy_that_was_taken_while_it_could_not_be_read_is_nobodys() -> None:
    node = Node()
    held(node, lock(0, A))
    for energy in (100.0, 100.0, None, 900.0, 1000.0):
        node.tick(card(energy=energy))
    assert account(node).energy == 100.0


def test_locks_that_cannot_be_read_end_no_claim() -> None:
    node = worked()
    node.facts.locks = None
    assert node.tick(working()) == {}
    node.facts.locks = {bus(0): Lock(bus(0), None, "")}
    assert node.tick(working()) == {}
    held(node, lock(0, B))
    over = node.tick(working())
    assert over[A][bus(0)].observed == 3.0
    assert account(node, B).observed == 0.0


def test_the_peak_of_memory_is_of_its_own_time() -> None:
    node = Node()
    node.tick(card(memory_used=70 * GIB))
    held(node, lock(0, A, claimed_boottime=node.now + 1.5))
    before = node.frame(card(memory_used=70 * GIB))
    node.now += 2
    node.book.tick([before], node.facts, node.moment)  # it was measured before the claim
    for used in (3, 9, 5):
        node.tick(card(memory_used=used * GIB))
    held(node)
    over = node.tick(card(memory_used=60 * GIB))
    assert over[A][bus(0)].memory_peak == 9 * GIB


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
