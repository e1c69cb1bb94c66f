# SPDX-License-Identifier: Apache-2.0
"""What a claim is billed for: from its first look on, to its last second, and nothing else.

And who did what on a shared card: the work of all is nobody's, unless one claim has it alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.claim_accounting import Buckets, LedgerAccount, restore_buckets
from gpulock_exporter.state.collector_state import classify_device_processes

from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import Proc
from gpulock.store.locks import Lock
from tests.support.exporter_nodes import GIB, Node, card, facts, lock
from tests.support.trees import FakeProc, bus

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


def test_a_claim_that_goes_while_the_driver_hangs_waits_for_its_last_look_but_not_long() -> None:
    node = worked()
    held(node)
    assert (node.silence(), node.silence()) == ({}, {})
    assert node.tick(card(busy=1.5, observed=3.0))[A][bus(0)].busy == 2.0
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


@pytest.mark.parametrize("unread", [None, 9e15])
def test_energy_that_could_not_be_read_is_billed_to_who_held_all_the_time(
    unread: float | None,
) -> None:
    node, late = Node(), "c" * 16

    def tick(energy: float | None, times: int = 1) -> None:
        for _ in range(times):
            node.tick(card(0, energy=energy), card(1, energy=energy))

    held(node, lock(0, A), lock(1, B))
    tick(100.0, 2)
    tick(unread)
    held(node, lock(0, A), lock(1, late, claimed_boottime=node.now + 1))
    tick(unread, 3)
    tick(900.0)
    assert account(node).energy == 800.0
    assert account(node, late, 1).energy is None, "the most of it was another's"
    tick(1000.0)
    assert account(node, late, 1).energy == 100.0


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
    node.take(before)  # it was measured before the claim
    for used in (3, 9, 5):
        node.tick(card(memory_used=used * GIB))
    held(node)
    over = node.tick(card(memory_used=60 * GIB))
    assert over[A][bus(0)].memory_peak == 9 * GIB


def test_a_claim_that_was_there_before_the_exporter_shows_when_it_was_not_observed() -> None:
    node = Node()
    held(node, lock(0, A, claimed_boottime=node.now - 30))
    for _ in range(3):
        node.tick(working(1.0))
    buckets = account(node).buckets
    assert buckets.since == 970.0
    assert (sum(buckets.covered), buckets.covered[0], len(buckets.covered)) == (2000, 0, 33)


def filled(seconds: int, use: float = 0.5) -> Buckets:
    """Return the buckets of a claim that was looked at each second."""
    buckets = Buckets(100.0)
    for second in range(1, seconds + 1):
        buckets.add(100.0 + second, use, 1.0)
    return buckets


@pytest.mark.parametrize(("seconds", "width", "count"), [(64, 1, 64), (65, 2, 33), (1000, 16, 63)])
def test_the_width_doubles_when_all_are_full(seconds: int, width: float, count: int) -> None:
    buckets = filled(seconds)
    assert (buckets.width, len(buckets.used)) == (width, count)
    assert sum(buckets.covered) == 1000 * seconds
    assert buckets.used == [one / 2 for one in buckets.covered]
    assert restore_buckets(100.0, width, buckets.used, buckets.covered) == buckets


def test_a_look_at_several_seconds_is_spread_over_their_buckets() -> None:
    buckets = Buckets(0.0)
    buckets.add(3.5, 1.5, 3.0)
    assert buckets.used == [250, 500, 500, 250]
    assert buckets.covered == [500, 1000, 1000, 500]


FIRST, SECOND, THIRD = (f"{bus(0)}.share{number}" for number in (1, 2, 3))
OF_A, OF_B, OTHER, HIDDEN = 701, 702, 703, 704
BOTH = (lock(0, A, "share1", add_grp_id=65401), lock(0, B, "share2", add_grp_id=65402))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A card that two claims share, with a process of each, a stranger and a hidden one."""
    proc = FakeProc(tmp_path / "proc")
    proc.add(OF_A, groups=(65401,))
    proc.add(OF_B, groups=(65402,))
    proc.add(OTHER)
    proc.add(HIDDEN)
    (proc.root / str(HIDDEN) / "status").write_text("nonsense")
    found = Node(proc=str(proc.root))
    found.facts = facts(*BOTH)
    found.tick(card())
    return found


def told(node: Node, token: str, name: str) -> tuple[float, float]:
    """Return the seconds at work and observed of a share."""
    account = node.book.memory.ledger.of(name, token)
    assert account is not None
    return round(account.busy, 6), round(account.observed, 6)


NOBODY = (0.0, 0.0)  # seconds at work and observed: what it did is not known


@pytest.mark.parametrize(
    ("busy", "of_each"),
    [(0.0, (0.0, 1.0)), (0.005, (0.0, 1.0)), (0.5, NOBODY), (None, NOBODY)],
    ids=["at rest", "a monitor is no work", "at work for some", "not observed"],
)
def test_two_claims_rest_with_their_card_and_no_work_is_either_ones(
    node: Node, busy: float | None, of_each: tuple[float, float]
) -> None:
    node.tick(card(busy=busy, processes={OF_A: GIB}))
    assert [told(node, A, FIRST), told(node, B, SECOND)] == [of_each, of_each]


def test_all_that_a_card_does_is_of_the_only_claim_on_it(node: Node) -> None:
    more = lock(0, A, "share3", add_grp_id=65401)
    node.facts = facts(BOTH[0], more)
    for _ in range(2):
        node.tick(card(processes={OF_A: GIB}))
    assert told(node, A, FIRST) == (1.0, 2.0)
    assert told(node, A, THIRD) == (0.5, 1.0), "held since the look before"
    node.tick(card(processes={OF_A: GIB, OTHER: GIB}))
    assert told(node, A, FIRST) == (1.0, 2.0), "a stranger works there as well"
    assert node.book.memory.ledger.accounts[A][FIRST].foreign == 1.0
    node.tick(card(processes={OF_A: GIB, HIDDEN: GIB}))
    assert told(node, A, FIRST) == (1.0, 2.0), "and so may one that is hidden"


def test_who_is_not_known_to_be_alone_is_not_billed(node: Node) -> None:
    node.facts = facts(*(Lock(one.id, None, "torn") for one in BOTH))
    node.tick(card(processes={}))
    assert [told(node, A, FIRST), told(node, B, SECOND)] == [NOBODY, NOBODY], "two claims"
    node.tick()
    assert told(node, A, FIRST) == NOBODY, "a card that is lost"
    node.facts = facts(BOTH[0])
    node.tick(card())
    assert told(node, A, FIRST) == NOBODY, "without a list of processes"
    node.facts = facts(BOTH[0], Lock(THIRD, None, "torn"))
    for _ in range(2):
        node.tick(card(processes={}))
    assert told(node, A, FIRST) == NOBODY, "beside a lock that cannot be read"


def test_a_share_is_idle_as_long_as_its_card_rests(node: Node) -> None:
    for _ in range(3):
        node.tick(card(busy=0.0))
    snapshot = node.snapshot()
    since = {name: node.moment.wall - 3 for name in (FIRST, SECOND)}
    assert snapshot.devices[0].share_idle_since == pytest.approx(since)


def test_the_memory_peak_of_a_share_is_that_of_its_processes(node: Node) -> None:
    node.tick(card(processes={OF_A: 3 * GIB, OF_B: GIB}))
    node.tick(card(processes={OF_A: 2 * GIB, OF_B: GIB}))
    accounts = [node.book.memory.ledger.of(*of) for of in ((FIRST, A), (SECOND, B))]
    assert [one.memory_peak for one in accounts if one] == [3 * GIB, GIB]


def test_all_on_a_device_are_counted_by_whose_they_are(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.add(OF_A, groups=(65400,))
    proc.add(705, "Xorg", uids=(0, 0, 0, 0))
    for pid in (OF_B, OTHER, HIDDEN):
        proc.add(pid)
    (proc.root / str(HIDDEN) / "status").write_text("nonsense")
    listed = dict.fromkeys((OF_A, 705, OTHER, OF_B, HIDDEN, 706))
    found = classify_device_processes(
        listed, [lock()], ProcessScan(Proc(str(proc.root))), ("Xorg",)
    )
    assert (found.nvml_count, found.foreign, found.unseen) == (5, (OF_B, OTHER), 1)


def test_memory_is_of_the_share_whose_process_uses_it(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    for number, groups in enumerate(((65401,), (65402,), (65402,), (), (65401, 65402))):
        proc.add(700 + number, groups=groups)
    places = ((1, 65401), (2, 65402), (3, 65402), (4, 65403))
    locks = [lock(0, f"t{gid}", f"share{number}", add_grp_id=gid) for number, gid in places]
    tree = ProcessScan(Proc(str(proc.root)))
    listed = {700 + number: 10**number for number in range(6)}  # the last has ended
    found = classify_device_processes(listed, locks, tree, ())
    used = {name.rpartition(".")[2]: memory for name, memory in found.share_memory.items()}
    assert used == {"share1": 1, "share2": 110, "share3": 0, "share4": 0}
    untold = {**listed, 706: None}
    assert classify_device_processes(untold, locks, tree, ()).share_memory == {}
    assert classify_device_processes(listed, [lock()], tree, ()).share_memory == {}
