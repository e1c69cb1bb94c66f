# SPDX-License-Identifier: Apache-2.0
"""Who did what on a shared card: the work of all is nobody's, unless one claim has it alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpulock_exporter.state.collector_state import classify_device_processes

from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import Proc
from gpulock.store.locks import Lock
from tests.support.exporter_nodes import GIB, Node, card, facts, lock
from tests.support.trees import FakeProc, bus

A, B = "a" * 16, "b" * 16
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
