# SPDX-License-Identifier: Apache-2.0
"""What is held, as records and lock directories tell it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.store.locks import LockStore
from tests.support.faults import refusal
from tests.support.locks import place_lock, say_mps
from tests.support.trees import bus, record

ONE = bus(0)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777, 0o755])
def test_a_directory_of_somebody_else_or_that_others_may_write_is_refused(
    store: LockStore, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    store.check()
    os.chmod(store.path, mode)
    if mode == 0o755:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert refusal(store.check).kind == BROKEN


def test_a_link_to_a_good_directory_is_refused(store: LockStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.path)
    with pytest.raises(Refusal):
        LockStore(str(tmp_path / "link")).check()
    with pytest.raises(Refusal):
        LockStore(str(tmp_path / "gone")).check()


def test_a_boot_id_that_cannot_be_read_is_unknown_not_missing(store: LockStore) -> None:
    assert store.boot_id() == ""
    os.mkfifo(f"{store.root}/boot_id")
    assert refusal(store.boot_id).kind == UNKNOWN


def test_the_marks_of_a_claim_are_all_its_locks(store: LockStore) -> None:
    for number in (0, 1):
        place_lock(store, bus(number), record(devices=(bus(0), bus(1))))
    store.mark_seen(record().token)
    store.mark_draining(record().token)
    store.mark_draining(record().token)
    store.anchor(record().token, 600, 2000, 0)
    say_mps(store, "700 1000\n")
    for lock in store.read_detailed_locks().values():
        assert lock.seen and lock.owner and lock.owner.draining == 1
        assert (lock.anchors, lock.mps) == ([(600, 2000, 0)], "700 1000")
    Path(store.claims_dir, record().token, "anchors", "65401").write_text("600")
    faults = [lock.fault for lock in store.read_detailed_locks().values()]
    assert [fault.startswith("its anchors: ") for fault in faults] == [True, True]


def test_a_claim_is_held_as_long_as_its_record_names_the_device_or_cannot_be_read(
    store: LockStore,
) -> None:
    place_lock(store, ONE, record())
    token = record().token
    assert (store.is_held(token), store.is_held(token, ONE)) == (True, True)
    assert not store.is_held(token, bus(1))
    assert not store.is_held("feed")
    path = Path(store.claims_dir, token, "record")
    path.write_text("garbage")
    assert store.is_held(token, bus(1))
    path.unlink()
    path.mkdir()
    assert store.is_held(token, bus(1))


def test_what_is_held_is_unknown_where_nobody_can_see(tmp_path: Path) -> None:
    assert LockStore(str(tmp_path / "other")).read_all_locks() == {}
    (tmp_path / "file.claims").write_text("")
    assert refusal(lambda: LockStore(str(tmp_path / "file")).read_all_locks()).kind == UNKNOWN


def test_both_folders_are_made_and_checked(tmp_path: Path) -> None:
    made = LockStore(str(tmp_path / "run"))
    made.check(make=True)
    os.chmod(made.root, 0o777)
    with pytest.raises(Refusal):
        made.check()
    os.rmdir(made.root)
    Path(made.root).write_text("a file")
    with pytest.raises(Refusal):
        made.check(make=True)


def test_of_the_tasks_of_a_group_the_last_is_the_anchor(store: LockStore) -> None:
    place_lock(store, ONE, record())
    for pid in (600, 601):
        store.anchor(record().token, pid, 2000, 65401)
    lock = store.read(ONE)
    store.read_details([lock])
    assert (lock.anchors, lock.groups()) == ([(601, 2000, 65401)], [65400, 65401])


@pytest.mark.parametrize("text", ["600", "x 1 0", "600 5 6 7", "9" * 5000 + " 1 0", ""])
def test_anchors_that_cannot_be_read_are_a_fault(store: LockStore, text: str) -> None:
    place_lock(store, ONE, record())
    store.anchor(record().token, 601, 2000, 0)
    Path(store.claims_dir, record().token, "anchors", "65401").write_text(text)
    lock = store.read(ONE)
    store.read_details([lock])
    assert lock.fault.startswith("its anchors: ")


def test_an_owner_that_names_other_devices_is_a_fault(store: LockStore) -> None:
    place_lock(store, ONE, record())
    os.rename(f"{store.locks_dir}/{ONE}", f"{store.locks_dir}/{bus(1)}")
    assert store.read(bus(1)).fault == "its owner record names other devices"
