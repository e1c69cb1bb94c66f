# SPDX-License-Identifier: Apache-2.0
"""Claims are made, shrink and end: the record first, and last."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpulock.errors import Refusal
from gpulock.store import atomic, grants
from gpulock.store.event_log import count_dropped_claims
from gpulock.store.locks import LockStore, list_names
from gpulock.store.owner import Owner, parse_owner
from tests.support.faults import disk_full, raising, returning
from tests.support.trees import BOOT, OTHER_BOOT, bus, record

TOKEN = "feedfacefeedface"
TWO = record(devices=(bus(0), bus(1)), uuids=("GPU-0", "GPU-1"), minors=("0", "1"))


def release(store: LockStore, *names: str, how: str = "epilog", boot_id: str = BOOT) -> None:
    grants.release_devices(store, TOKEN, names, how, boot_id)


def holders(store: LockStore) -> dict[str, tuple[str, str, str]]:
    return {
        name: (lock.owner.token, lock.owner.uuid_of(name), lock.owner.minor_of(name))
        for name, lock in store.read_all_locks().items()
        if lock.owner
    }


def released_lines(store: LockStore) -> list[str]:
    path = Path(store.finished_dir, TOKEN, "released")
    return [line for line in path.read_text().splitlines() if line]


def test_the_folder_of_a_claim_has_its_name_once_its_record_is_whole(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", disk_full)
    monkeypatch.setattr(grants, "undo_claim", returning(None))  # as if it were killed
    with pytest.raises(OSError, match="No space"):
        grants.make_claim(store, TWO)
    assert list_names(store.claims_dir) == []


def test_a_claim_is_undone_newest_lock_first(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    grants.make_claim(store, TWO)
    gone: list[str] = []
    monkeypatch.setattr(grants, "remove_lock", lambda _, name: gone.append(name))
    grants.undo_claim(store, TOKEN, TWO.devices)
    assert (gone, os.listdir(store.claims_dir)) == ([bus(1), bus(0)], [])


def test_how_a_part_ended_is_noted_and_its_record_shrinks_before_a_lock_goes(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a release that is killed in the middle, the next one knows neither why nor of what."""
    grants.make_claim(store, TWO)
    monkeypatch.setattr(grants, "remove_lock", raising(OSError(5, "killed here")))
    with pytest.raises(OSError, match="killed here"):
        release(store, bus(0))
    assert "epilog" in Path(store.claims_dir, TOKEN, "released").read_text()
    assert parse_owner(store.read_record(TOKEN)).devices == (bus(1),)


def test_the_end_of_a_claim_of_another_boot_is_not_told_by_this_ones_clock(
    store: LockStore,
) -> None:
    grants.make_claim(store, TWO)
    Path(store.claims_dir, TOKEN, "released").write_text("cut short")
    release(store, *TWO.devices, how="of two\nlines", boot_id=OTHER_BOOT)
    short, *lines = released_lines(store)
    words = [f"- {n} GPU-{n} of two?lines" for n in (0, 1)]
    assert (short, [line.split(" ", 2)[2] for line in lines]) == ("cut short", words)


def test_what_a_claim_does_not_have_is_not_released(store: LockStore) -> None:
    grants.make_claim(store, TWO)
    with pytest.raises(Refusal, match="changed meanwhile"):
        release(store, bus(0), bus(2))
    assert sorted(holders(store)) == [bus(0), bus(1)]


def test_a_finish_that_fails_keeps_the_record_of_what_the_history_is_owed(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    grants.make_claim(store, TWO)
    monkeypatch.setattr(os, "rename", raising(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        grants.finish_claim(store, TOKEN)
    assert os.listdir(store.claims_dir) == [TOKEN]


def test_a_claim_that_is_gone_is_not_released(store: LockStore) -> None:
    with pytest.raises(Refusal):
        release(store, bus(0))


def test_a_record_that_cannot_be_understood_is_not_released(store: LockStore) -> None:
    grants.make_claim(store, TWO)
    Path(store.claims_dir, TOKEN, "record").write_text("gpulock-owner 2\n")
    with pytest.raises(OSError):
        release(store, bus(0))


def test_a_release_that_cannot_note_when_has_released(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    grants.make_claim(store, TWO)
    monkeypatch.setattr(os, "write", disk_full)
    release(store, *TWO.devices)
    assert holders(store) == {}
    assert sorted(os.listdir(f"{store.finished_dir}/{TOKEN}")) == ["record", "released"]


def test_a_claim_that_was_finished_and_put_back_is_finished_once(store: LockStore) -> None:
    grants.make_claim(store, TWO)
    release(store, *TWO.devices)
    grants.make_claim(store, TWO)
    release(store, *TWO.devices)
    assert (os.listdir(store.claims_dir), os.listdir(store.finished_dir)) == ([], [TOKEN])


def finish(store: LockStore, token: str) -> None:
    own: Owner = record(token=token)
    grants.make_claim(store, own)
    grants.release_devices(store, token, own.devices, "epilog", BOOT)


def test_finished_claims_do_not_pile_up_and_the_oldest_go_first(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "FINISHED_CAP", 6)
    monkeypatch.setattr(grants, "FINISHED_PRUNE", 4)
    for number in range(6):
        finish(store, f"t{9 - number}")  # not in the order of their names
        os.utime(f"{store.finished_dir}/t{9 - number}", (number, number))
    assert sorted(os.listdir(store.finished_dir)) == ["t4", "t5"]
    assert count_dropped_claims(store.path) == 4


def test_where_nobody_writes_a_history_no_lines_are_owed(
    store: LockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would fill STATE_DIR, one file a claim."""
    monkeypatch.setattr(grants, "FINISHED_PRUNE", 1)
    grants.note_owed_line(str(tmp_path), store, TWO)
    assert os.listdir(tmp_path / grants.OWED) == [TOKEN]
    finish(store, "t")
    grants.note_owed_line(str(tmp_path), store, TWO.copy(token="u"))
    assert os.listdir(tmp_path / grants.OWED) == [TOKEN]


def test_a_finished_claim_that_is_dropped_is_counted_first(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is killed in between has counted too many, never too few."""
    monkeypatch.setattr(grants, "FINISHED_CAP", 1)
    monkeypatch.setattr(atomic, "remove_folder", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        finish(store, "t")
    assert count_dropped_claims(store.path) == 1


def test_a_line_that_cannot_be_owed_stops_no_job_and_lost_records_keep_no_copy_back(
    store: LockStore, tmp_path: Path
) -> None:
    os.rmdir(store.finished_dir)
    grants.note_owed_line(str(tmp_path), store, TWO)
    assert os.listdir(tmp_path / grants.OWED) == [TOKEN]
    grants.note_owed_line(str(tmp_path / grants.OWED / TOKEN), store, TWO)
    assert os.listdir(tmp_path / grants.OWED) == [TOKEN]


def test_a_part_is_released_although_another_lock_is_lost(store: LockStore) -> None:
    grants.make_claim(store, TWO)
    grants.remove_lock(store, bus(1))
    grants.remove_lock(store, bus(0))
    release(store, bus(0))
    assert sorted(holders(store)) == [bus(1)]
