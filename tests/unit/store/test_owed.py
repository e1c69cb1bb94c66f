# SPDX-License-Identifier: Apache-2.0
"""A claim is owed a line of the history, also over a reboot; what fails there fails no job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.store import atomic, grants, owed
from gpulock.store.event_log import count_dropped_claims
from gpulock.store.locks import LockStore
from gpulock.store.owner import parse_owner
from tests.support.faults import disk_full
from tests.support.trees import record


@pytest.fixture
def store(tmp_path: Path) -> LockStore:
    made = LockStore(str(tmp_path / "run"))
    os.makedirs(made.finished_dir)
    os.makedirs(made.path)
    (tmp_path / "state").mkdir()
    return made


def note(store: LockStore, root: Path, token: str = "feed") -> None:
    owed.note_owed_line(str(root / "state"), store, record(token=token))


def test_the_copy_is_the_record(store: LockStore, tmp_path: Path) -> None:
    for token in ("feed", "cafe"):
        note(store, tmp_path, token)
    assert parse_owner((tmp_path / "state/owed/feed").read_text()).token == "feed"
    assert sorted(os.listdir(tmp_path / "state/owed")) == ["cafe", "feed"]


def test_a_full_disk_fails_no_claim(
    store: LockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "create_file", disk_full)
    note(store, tmp_path)


def test_where_nobody_writes_a_history_no_copies_pile_up(
    store: LockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "FINISHED_PRUNE", 1)
    os.mkdir(f"{store.finished_dir}/t")
    note(store, tmp_path)
    assert not (tmp_path / "state/owed").exists()


def test_the_oldest_copies_go_at_a_boot_and_are_counted(
    store: LockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owed, "CAP", 2)
    for number in range(4):
        note(store, tmp_path, f"t{number}")
        os.utime(tmp_path / f"state/owed/t{number}", (number, number))
    owed.limit_owed_records(str(tmp_path / "state"), store)
    assert sorted(os.listdir(tmp_path / "state/owed")) == ["t2", "t3"]
    assert count_dropped_claims(store.path) == 2


def test_no_copies_are_not_limited(store: LockStore, tmp_path: Path) -> None:
    owed.limit_owed_records(str(tmp_path / "state"), store)
    note(store, tmp_path)
    owed.limit_owed_records(str(tmp_path / "state"), store)
    assert os.listdir(tmp_path / "state/owed") == ["feed"]


def test_a_claim_is_owed_its_line_where_nobody_can_count_what_waits(
    store: LockStore, tmp_path: Path
) -> None:
    os.rmdir(store.finished_dir)
    note(store, tmp_path)
    assert os.listdir(tmp_path / "state/owed") == ["feed"]
