# SPDX-License-Identifier: Apache-2.0
"""What gpulock's own files say, with each of them broken in turn."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gpulock_exporter.state.local_state import ledger_claims, read_local_state

from gpulock.deadline import clock_boottime
from gpulock.store import quarantine, verdicts
from gpulock.store.locks import Lock
from gpulock.store.verdicts import DEAD, Verdict
from tests.support.exporter_nodes import lock
from tests.support.locks import place_lock
from tests.support.trees import BOOT, OTHER_BOOT, Box, box_at_work, bus, record

TOKEN = record().token


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Return a node on which claims were made."""
    found = box_at_work(tmp_path)
    place_lock(found.node().store, bus(0), record())
    return found


def test_everything_is_read_and_timed(box: Box) -> None:
    node = box.node()
    quarantine.write_device_note(str(box.state), quarantine.QUARANTINE, bus(1), "root", "ECC")
    dead = Verdict(DEAD, "gone")
    dead.orphans = "process 7"
    verdicts.write_verdicts(str(box.lock), {TOKEN: dead}, BOOT)
    (box.lock / "events").write_text("1.0 totals claims_granted=5\n")
    now = clock_boottime()
    facts = read_local_state(node, now)
    assert facts.failures == {}
    assert facts.sources == {"counters", "locks", "quarantine", "verdicts"}
    assert facts.locks is not None
    assert facts.find_orphans(facts.locks[bus(0)]) == "process 7"
    assert facts.quarantined == {bus(1): "ECC (root)"}
    assert facts.verdicts is not None
    assert facts.verdicts[TOKEN].state == DEAD
    assert facts.reconciled == pytest.approx(now, abs=5)
    assert facts.counters == {"claims_granted": 5}


@pytest.mark.parametrize(
    ("name", "source", "content"),
    [
        ("verdicts", "verdicts", b"nonsense\n"),
        ("events", "counters", b"\xff\n" * (1 << 20)),
        ("boot_id", "verdicts", b"\xff\n" * (1 << 20)),
    ],
)
def test_a_file_that_is_broken_costs_only_what_it_tells(
    name: str, source: str, content: bytes, box: Box
) -> None:
    path = (box.records if name == "boot_id" else box.lock) / name
    path.write_bytes(content)
    facts = read_local_state(box.node(), clock_boottime())
    assert list(facts.failures) == [source]
    assert facts.locks is not None
    assert facts.locks[bus(0)].owner is not None
    assert (facts.verdicts, facts.counters) == (None, {})


def test_locks_that_cannot_be_listed_are_not_known(box: Box) -> None:
    for path in (box.lock / "locks", box.state / "quarantine"):
        path.rename(path.with_suffix(".away"))
        path.write_text("")
    facts = read_local_state(box.node(), clock_boottime())
    assert (facts.locks, facts.quarantined) == (None, None)
    assert sorted(facts.failures) == ["locks", "quarantine"]


def test_who_holds_what_since_when() -> None:
    held = {
        bus(0): lock(0, "a", claimed_boottime=50.0),
        bus(1): lock(1, "b", claimed_boottime=5000.0),
        bus(2): lock(2, "c", boot_id=OTHER_BOOT, claimed_boottime=50.0),
        bus(3): Lock(bus(3), None, ""),
        bus(4): lock(4, "d", claimed_boottime=-5.0),
        bus(5): lock(5, "e", claimed_boottime=float("nan")),
        bus(6): lock(6, "../evil"),
    }
    found = ledger_claims(held, BOOT, 100.0)
    assert found is not None
    since = {name: (claim.token, claim.since) if claim else None for name, claim in found.items()}
    now = {bus(1): ("b", 100.0), bus(2): ("c", 100.0), bus(4): ("d", 100.0), bus(5): ("e", 100.0)}
    assert since == {bus(0): ("a", 50.0), bus(3): None, bus(6): None, **now}
    assert ledger_claims(None, BOOT, 100.0) is None


def test_records_that_were_lost_in_this_boot_are_not_known(box: Box) -> None:
    shutil.rmtree(box.records)
    facts = read_local_state(box.node(), clock_boottime())
    assert facts.locks is None
    assert facts.failures["locks"].startswith("the records of this boot's claims were lost: ")
