# SPDX-License-Identifier: Apache-2.0
"""The counters: they may be lost, they never stop anybody."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from gpulock.errors import BUSY
from gpulock.store import kv
from gpulock.store.counters import (
    ClaimCounters,
    note_lock_timeout,
    read_history_dropped,
)
from gpulock.store.grants import note_dropped
from gpulock.store.locks import LockStore
from gpulock.store.verdicts import SLURMCTLD
from tests.support.faults import disk_full

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def store(tmp_path: Path) -> LockStore:
    return LockStore(str(tmp_path))


def saved(store: LockStore) -> dict[str, str]:
    return kv.decode_pairs(Path(store.path, "totals").read_text())


def test_counters_add_up_over_processes(store: LockStore) -> None:
    for _ in range(3):
        totals = ClaimCounters(store)
        totals.count_result(BUSY, 0.25)
        totals.count_result("granted", 0)
        totals.save()
    assert saved(store) == {
        "claims_busy": "3",
        "lock_wait_seconds": "0.75",
        "claims_granted": "3",
    }


@pytest.mark.parametrize("text", ["", "garbage", "a=1\na=2\n", "\0\0", "gpulock 2\n"])
def test_garbage_is_replaced(store: LockStore, text: str) -> None:
    Path(store.path, "totals").write_text(text)
    totals = ClaimCounters(store)
    totals.add("releases")
    totals.save()
    assert saved(store) == {"releases": "1"}


def test_a_counter_that_is_no_number_begins_at_zero(store: LockStore) -> None:
    Path(store.path, "totals").write_text("releases=many\nother=1\n")
    totals = ClaimCounters(store)
    totals.add("releases", 2)
    totals.save()
    assert saved(store) == {"releases": "2", "other": "1"}


@pytest.mark.parametrize("text", ["a=x\ry\n", "a=\x1b\n"])
def test_a_value_that_cannot_be_written_stops_nobody(store: LockStore, text: str) -> None:
    Path(store.path, "totals").write_text(text)
    ClaimCounters(store).save()


def test_a_full_disk_stops_nobody(store: LockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", disk_full)
    totals = ClaimCounters(store)
    totals.add("releases")
    totals.save()
    note_lock_timeout(store, "12", "alice")
    assert not Path(store.path, "totals").exists()


def test_timeouts_are_counted_without_the_gate_and_folded_in_later(store: LockStore) -> None:
    for _ in range(3):
        note_lock_timeout(store, "12", "alice")
    totals = ClaimCounters(store)
    totals.save()
    assert saved(store) == {"lock_timeouts": "3"}
    ClaimCounters(store).save()
    assert saved(store) == {"lock_timeouts": "3"}


def test_what_the_history_lacks_is_counted_before_and_after_it_is_folded_in(
    store: LockStore,
) -> None:
    assert read_history_dropped(store) == 0
    for folded in (0, 3):
        note_dropped(store, 3)
        assert read_history_dropped(store) == folded + 3
        ClaimCounters(store).save()
        assert saved(store) == {"history_dropped": str(folded + 3)}
    Path(store.path, "totals").write_text("history_dropped=nan\n")
    assert read_history_dropped(store) == 0


def test_a_link_planted_for_timeouts_is_not_followed(store: LockStore, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("")
    (tmp_path / "timeouts").symlink_to("target")
    note_lock_timeout(store, "12", "alice")
    assert (tmp_path / "target").read_text() == ""


@pytest.mark.parametrize(
    ("asked", "broken"),
    [
        ([("a", "1"), ("a", "2"), ("a", "3"), ("a", "4")], False),
        ([("a", "1"), ("b", "1")], False),
        ([("a", "1"), ("b", "2"), ("a", "1"), ("b", "2")], False),
        ([("a", "1"), ("a", "2"), ("b", "3")], True),
        ([("a", "1"), ("b", "2"), ("c", "3")], True),
        ([("a,b:1,c:2,d", "1")], False),
    ],
)
def test_a_streak_is_three_jobs_of_two_owners(
    store: LockStore, asked: list[tuple[str, str]], broken: bool
) -> None:
    found = False
    for user, job in asked:
        totals = ClaimCounters(store)
        found = totals.note_unknown_streak(job, user)
        totals.save()
    assert found is broken


def test_a_streak_does_not_grow_for_ever(store: LockStore) -> None:
    totals = ClaimCounters(store)
    for job in range(1000):
        totals.note_unknown_streak(str(job), "alice")
    assert len(totals.values["streak"]) < 200


def test_every_verdict_of_death_says_by_what() -> None:
    calls = [
        (node, ast.unparse(node))
        for path in sorted((ROOT / "gpulock").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    deaths = [node for node, text in calls if text.startswith("Verdict(DEAD, ")]
    assert len(deaths) > 8
    said = {ast.unparse(node.args[2]) for node in deaths}
    assert said == {
        *("REBOOT", "RELEASED", "PROCESS", "SHEPHERD", "STEPS", "SLURMCTLD"),
    }


def test_a_lock_that_was_freed_is_counted_by_what_proved_its_owner_dead(store: LockStore) -> None:
    totals = ClaimCounters(store)
    totals.count_reap(SLURMCTLD)
    totals.count_reap(SLURMCTLD)
    assert totals.values == {"reaped_slurmctld": "2"}
