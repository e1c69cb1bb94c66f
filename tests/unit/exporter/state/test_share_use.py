# SPDX-License-Identifier: Apache-2.0
"""Who did what on a shared card: work goes to the owner of each process, or to nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpulock_exporter.telemetry import Process
from hypothesis import given, settings  # noqa: TID251 (a count alone)
from hypothesis import strategies as st

from tests.support.exporter_nodes import GIB, Node, card, facts, lock
from tests.support.trees import FakeProc, bus

A, B = "a" * 16, "b" * 16
FIRST, SECOND, THIRD = (f"{bus(0)}.share{number}" for number in (1, 2, 3))
OF_A, OF_B, OTHER, SERVER, HIDDEN = 701, 702, 703, 704, 705
BOTH = (lock(0, A, "share1", add_grp_id=65401), lock(0, B, "share2", add_grp_id=65402))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A card that two claims share, with a process of each, a stranger and a display server."""
    proc = FakeProc(tmp_path / "proc")
    proc.add(OF_A, groups=(65401,))
    proc.add(OF_B, groups=(65402,))
    proc.add(OTHER)
    proc.add(SERVER, "Xorg", uids=(0, 0, 0, 0))
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


def both(node: Node) -> list[tuple[float, float]]:
    """Return the seconds of both claims."""
    return [told(node, A, FIRST), told(node, B, SECOND)]


NOBODY = (0.0, 0.0)  # seconds at work and observed: what it did is not known


@pytest.mark.parametrize(
    ("busy", "use", "of_a", "of_b"),
    [
        pytest.param(0.5, {OF_A: 0.3, OF_B: 0.1}, (0.3, 1.0), (0.1, 1.0), id="each its own"),
        pytest.param(0.5, {OF_A: 0.3}, (0.3, 1.0), (0.0, 1.0), id="one idle"),
        pytest.param(0.5, {OF_A: 0.3, SERVER: 0.2}, (0.3, 1.0), (0.0, 1.0), id="a service"),
        pytest.param(0.0, None, (0.0, 1.0), (0.0, 1.0), id="the card idle"),
        pytest.param(0.005, None, (0.0, 1.0), (0.0, 1.0), id="a monitor is no work"),
        pytest.param(0.5, None, NOBODY, NOBODY, id="not told"),
        pytest.param(0.5, {}, NOBODY, NOBODY, id="of no process"),
        pytest.param(0.5, {OF_A: 0.0}, NOBODY, NOBODY, id="no work of any"),
        pytest.param(0.5, {OF_A: 0.3, OTHER: 0.2}, (0.3, 1.0), NOBODY, id="a stranger"),
        pytest.param(0.5, {OF_A: 0.3, HIDDEN: 0.2}, NOBODY, NOBODY, id="one that is hidden"),
        pytest.param(0.5, {OF_A: 0.3, 999: 0.2}, NOBODY, NOBODY, id="one that is gone"),
        pytest.param(0.5, {OF_A: 0.2}, (0.2, 1.0), NOBODY, id="little is told"),
        pytest.param(
            0.5, {OF_A: 0.9, OF_B: 0.3, SERVER: 0.3}, (0.3, 1.0), (0.1, 1.0), id="too much is told"
        ),
    ],
)
def test_work_goes_to_the_owner_of_each_process_or_to_nobody(
    node: Node,
    busy: float,
    use: dict[int, float] | None,
    of_a: tuple[float, float],
    of_b: tuple[float, float],
) -> None:
    words = None if use is None else {str(pid): part for pid, part in use.items()}
    node.tick(card(busy=busy, process_use=words))
    assert both(node) == [of_a, of_b]
    known = {name: of[0] for name, of in ((FIRST, of_a), (SECOND, of_b)) if of[1]}
    assert node.snapshot().devices[0].share_use == pytest.approx(known)


def idle(node: Node) -> dict[str, float]:
    """Return for how long each share is known to be idle."""
    snapshot = node.snapshot()
    (seen,) = snapshot.devices
    looked = snapshot.health.sampled or 0.0
    return {name: looked - since for name, since in seen.share_idle_since.items()}


def test_each_share_is_idle_by_its_own_clock(node: Node) -> None:
    for _ in range(3):
        node.tick(card(process_use={str(OF_A): 0.3}))
    assert idle(node) == pytest.approx({FIRST: 0.0, SECOND: 3.0})
    node.tick(card(busy=0.0))
    assert idle(node) == pytest.approx({FIRST: 1.0, SECOND: 4.0})


def test_what_may_be_of_both_claims_is_of_none(node: Node) -> None:
    node.facts = facts(BOTH[0], lock(0, B, "share2", add_grp_id=65401))
    node.tick(card(process_use={str(OF_A): 0.3}))
    node.tick(card(process_use={str(OF_A): 0.3}))
    assert both(node) == [(0.0, 0.0), (0.0, 0.0)]


def test_all_that_a_card_does_is_of_the_only_claim_on_it(node: Node) -> None:
    node.facts = facts(BOTH[0])
    node.tick(card(processes=[Process(OF_A, GIB)]))
    assert told(node, A, FIRST) == (0.5, 1.0)
    node.tick(card(processes=[Process(OF_A, GIB), Process(OTHER, GIB)]))
    assert told(node, A, FIRST) == (0.5, 1.0), "a stranger works there as well"
    node.tick(card(processes=[Process(OF_A, GIB), Process(HIDDEN, GIB)]))
    assert told(node, A, FIRST) == (0.5, 1.0), "and so may one that is hidden"


def test_a_claim_of_two_places_works_on_both_and_is_shown_once(node: Node) -> None:
    more = lock(0, A, "share3", add_grp_id=65401)
    node.facts = facts(*BOTH, more)
    node.tick(card(busy=0.0))
    node.tick(card(process_use={str(OF_A): 0.3}))
    assert told(node, A, FIRST)[0] == told(node, A, THIRD)[0] == 0.3
    assert set(node.snapshot().devices[0].share_use) == {FIRST, SECOND}


def test_beside_a_lock_that_cannot_be_read_nobody_is_billed(node: Node) -> None:
    broken = lock(0, B, "share3")
    broken.owner = None
    node.facts = facts(*BOTH, broken)
    node.tick(card(process_use={str(OF_A): 0.3}))
    assert both(node) == [(0.0, 0.0), (0.0, 0.0)]
    node.facts = facts(BOTH[0], broken)
    for _ in range(2):
        node.tick(card(processes=[]))
    assert told(node, A, FIRST) == (0.0, 0.0), "it is not known to be alone"


def test_the_memory_peak_of_a_share_is_that_of_its_processes(node: Node) -> None:
    node.tick(card(processes=[Process(OF_A, 3 * GIB), Process(OF_B, GIB)]))
    node.tick(card(processes=[Process(OF_A, 2 * GIB), Process(OF_B, GIB)]))
    accounts = [node.book.memory.ledger.of(*of) for of in ((FIRST, A), (SECOND, B))]
    assert [one.memory_peak for one in accounts if one] == [3 * GIB, GIB]


USES = st.dictionaries(
    st.sampled_from([str(pid) for pid in (OF_A, OF_B, OTHER, SERVER, 999)]), st.floats(0, 1)
)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.none() | USES, st.floats(0, 1)), max_size=8))
def test_no_claim_works_more_than_its_card(
    tmp_path_factory: pytest.TempPathFactory, looks: list[tuple[dict[str, float] | None, float]]
) -> None:
    proc = FakeProc(tmp_path_factory.mktemp("proc") / "proc")
    proc.add(OF_A, groups=(65401,))
    proc.add(OF_B, groups=(65402,))
    node = Node(proc=str(proc.root))
    node.facts = facts(*BOTH)
    node.tick(card())
    for use, busy in looks:
        node.tick(card(process_use=use, busy=busy))
    whole = node.book.memory.totals.devices.get(bus(0))
    assert whole is not None
    assert sum(busy for busy, _ in both(node)) <= whole.busy + 1e-5
    for busy, observed in both(node):
        assert busy <= observed + 1e-6 <= whole.observed + 2e-6
