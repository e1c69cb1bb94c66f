# SPDX-License-Identifier: Apache-2.0
"""The lock directory: mkdir is the grant, one rename is the release."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.store import atomic, locks
from gpulock.store.counters import read_history_dropped
from gpulock.store.locks import Lock, LockStore
from tests.support.faults import disk_full, raising
from tests.support.trees import bus, record

ONE = bus(0)


@pytest.fixture
def store(tmp_path: Path) -> LockStore:
    made = LockStore(str(tmp_path / "run"))
    os.makedirs(made.locks_dir)
    os.makedirs(made.released_dir)
    return made


def test_a_lock_reads_back_as_it_was_made(store: LockStore) -> None:
    store.make(ONE, record())
    found = store.read_all_locks()
    assert list(found) == [ONE]
    owner = found[ONE].owner
    assert owner is not None and owner.key() == record().key()
    assert (found[ONE].fault, found[ONE].groups()) == ("", [65400])


def test_a_lock_can_be_made_once(store: LockStore) -> None:
    store.make(ONE, record())
    with pytest.raises(FileExistsError):
        store.make(ONE, record(token="b"))
    owner = store.read(ONE).owner
    assert owner is not None and owner.token == record().token


def test_an_empty_lock_of_an_older_prolog_is_a_lock_as_well(store: LockStore) -> None:
    """A rename onto an empty folder would succeed and steal it; mkdir does not."""
    os.mkdir(f"{store.locks_dir}/{ONE}")
    with pytest.raises(FileExistsError):
        store.make(ONE, record())
    assert (store.read(ONE).owner, store.read(ONE).fault) == (None, "")


def test_a_peer_that_is_between_mkdir_and_owner_is_not_overtaken(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def peer_first(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(path, mode, dir_fd=dir_fd)
        real(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", peer_first)
    with pytest.raises(FileExistsError):
        store.make(ONE, record())


def test_what_is_no_lock_is_held(store: LockStore) -> None:
    Path(store.locks_dir, ONE).write_text("a file, not a folder")
    assert store.read(ONE).fault != ""


def test_hidden_names_are_no_locks(store: LockStore) -> None:
    os.mkdir(f"{store.locks_dir}/.{ONE}")
    assert store.read_all_locks() == {}


def test_a_released_lock_is_kept_with_when_and_how(store: LockStore) -> None:
    store.make(ONE, record())
    store.retire(store.read(ONE), "epilog")
    assert store.read_all_locks() == {}
    kept = Path(store.released_dir, f"{record().token}.{ONE}")
    assert sorted(os.listdir(kept)) == ["owner", "released"]
    assert "how=epilog" in (kept / "released").read_text()


@pytest.mark.parametrize("now", ["other", "none", "garbage"])
def test_a_lock_that_is_another_since_it_was_judged_is_not_released(
    store: LockStore, now: str
) -> None:
    store.make(ONE, record())
    judged = store.read(ONE)
    owner = Path(store.locks_dir, ONE, "owner")
    if now == "other":
        store.rewrite(ONE, record(token="other"))
    elif now == "none":
        owner.unlink()
    else:
        owner.write_text("gpulock-owner 2\n")
    with pytest.raises(Refusal) as caught:
        store.retire(judged, "epilog")
    assert caught.value.kind == UNKNOWN
    assert list(store.read_all_locks()) == [ONE]


def test_a_claim_cut_short_that_got_its_owner_meanwhile_is_not_released(store: LockStore) -> None:
    os.mkdir(f"{store.locks_dir}/{ONE}")
    judged = store.read(ONE)
    store.rewrite(ONE, record())
    with pytest.raises(Refusal):
        store.retire(judged, "reap")
    assert list(store.read_all_locks()) == [ONE]


def test_a_release_that_cannot_write_its_note_has_released(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.make(ONE, record())
    lock = store.read(ONE)
    monkeypatch.setattr(os, "write", disk_full)
    store.retire(lock, "epilog")
    assert store.read_all_locks() == {}


def test_a_release_that_is_killed_before_its_end_is_still_held_and_the_next_one_says_how(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.make(ONE, record())
    rename = os.rename

    def die(source: str, target: str, **about: int | None) -> None:
        if source.endswith(f"/{ONE}"):  # the lock's own, not that of its note
            raise KeyboardInterrupt
        rename(source, target, **about)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            store.retire(store.read(ONE), "epilog")
    assert store.read(ONE).owner is not None
    store.retire(store.read(ONE), "reap: its shepherd is gone")
    note = Path(store.released_dir, f"{record().token}.{ONE}", "released").read_text()
    assert note.count("how=") == note.count("how=reap: its shepherd is gone") == 1


def test_a_release_that_is_killed_behind_its_rename_has_said_how(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.make(ONE, record())
    rename = os.rename

    def die(source: str, target: str, **about: int | None) -> None:
        rename(source, target, **about)
        if source.endswith(f"/{ONE}"):  # the lock's own, not that of its note
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", die)
    lock = store.read(ONE)
    with pytest.raises(KeyboardInterrupt):
        store.retire(lock, "epilog")
    assert store.read_all_locks() == {}
    note = Path(store.released_dir, f"{record().token}.{ONE}", "released")
    assert "how=epilog" in note.read_text()


def test_a_how_that_cannot_be_written_keeps_no_device(store: LockStore) -> None:
    store.make(ONE, record())
    store.retire(store.read(ONE), "reap: process 1 (a\nb) has it")
    assert store.read_all_locks() == {}


def count_no_links(patch: pytest.MonkeyPatch) -> None:
    """Let every folder have one link, as on btrfs and on a merged overlay."""
    real = os.stat

    def stat(path: str, **more: bool) -> os.stat_result:
        found = real(path, **more)
        return os.stat_result((*found[:3], 1, *found[4:10]))

    patch.setattr(os, "stat", stat)


@pytest.mark.parametrize("counted", [True, False])
def test_released_locks_do_not_pile_up_and_the_oldest_go_first(
    store: LockStore, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    if not counted:
        count_no_links(monkeypatch)
    monkeypatch.setattr(locks, "RELEASED_CAP", 6)
    monkeypatch.setattr(locks, "RELEASED_PRUNE", 4)
    for number in range(6):
        store.make(ONE, record(token=f"t{number}"))
        store.retire(store.read(ONE), "epilog")
        os.utime(f"{store.released_dir}/t{number}.{ONE}", (number, number))
    assert sorted(os.listdir(store.released_dir)) == [f"t4.{ONE}", f"t5.{ONE}"]
    assert read_history_dropped(store) == 4


def test_a_released_lock_that_is_dropped_is_counted_first(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is killed in between has counted too many, never too few."""
    monkeypatch.setattr(locks, "RELEASED_CAP", 1)
    monkeypatch.setattr(atomic, "remove_folder", raising(KeyboardInterrupt))
    store.make(ONE, record())
    with pytest.raises(KeyboardInterrupt):
        store.retire(store.read(ONE), "epilog")
    assert read_history_dropped(store) == 1


def test_an_undone_lock_is_gone_and_one_that_cannot_be_undone_is_nobodys_fault(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.make(ONE, record())
    store.undo(ONE)
    assert store.read_all_locks() == {}
    store.undo(ONE)


def test_anchors_and_orphans_are_read_when_asked_for(store: LockStore) -> None:
    store.make(ONE, record())
    store.anchor(ONE, 600, 2000, 65401)
    store.anchor(ONE, 601, 2001, 0)
    store.mark_orphans(ONE, "process 7 has it open")
    lock = store.read(ONE)
    assert (lock.shepherds(), lock.orphans) == ([(500, 1000)], "")
    store.read_details(lock)
    assert sorted(lock.shepherds()) == [(500, 1000), (600, 2000), (601, 2001)]
    assert lock.groups() == [65400, 65401]
    assert lock.orphans == "process 7 has it open"


def test_a_lock_without_owner_has_no_shepherd_and_no_group() -> None:
    lock = Lock(ONE, None, "")
    assert (lock.shepherds(), lock.groups()) == ([], [])


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_directory_others_may_write_is_refused(store: LockStore, mode: int) -> None:
    store.check()
    os.chmod(store.path, mode)
    with pytest.raises(Refusal) as caught:
        store.check()
    assert caught.value.kind == BROKEN


def test_a_directory_of_somebody_else_is_refused(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(Refusal):
        store.check()


def test_a_link_to_a_good_directory_is_refused(store: LockStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.path)
    with pytest.raises(Refusal):
        LockStore(str(tmp_path / "link")).check()
    with pytest.raises(Refusal):
        LockStore(str(tmp_path / "gone")).check()


def test_a_directory_that_cannot_be_listed_is_unknown_not_empty(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", raising(PermissionError(13, "denied")))
    with pytest.raises(Refusal) as caught:
        store.read_all_locks()
    assert caught.value.kind == UNKNOWN


def test_a_boot_id_that_cannot_be_read_is_unknown_not_missing(store: LockStore) -> None:
    assert store.boot_id() == ""
    os.mkfifo(f"{store.path}/boot_id")
    with pytest.raises(Refusal) as caught:
        store.boot_id()
    assert caught.value.kind == UNKNOWN


def test_a_lock_that_was_not_understood_is_not_released_although_its_token_is_there(
    store: LockStore,
) -> None:
    store.make(ONE, record())
    os.mkfifo(f"{store.locks_dir}/{ONE}/anchors")
    lock = store.read(ONE)
    store.read_details(lock)
    with pytest.raises(Refusal):
        store.retire(lock, "released by uid 1000")
    assert list(store.read_all_locks()) == [ONE]


@pytest.mark.parametrize("other", [{"token": "feed1"}, {"token": "1", "user": "token=feed"}])
def test_a_token_is_compared_whole(store: LockStore, other: dict[str, str]) -> None:
    store.make(ONE, record(**other))
    assert not store.has_token(ONE, "feed")
    assert store.has_token(ONE, other["token"])
    assert not store.has_token(ONE, None)  # it has an owner by now


def test_orphans_that_cannot_be_read_are_orphans(store: LockStore) -> None:
    store.make(ONE, record())
    os.mkfifo(f"{store.locks_dir}/{ONE}/orphans")
    lock = store.read(ONE)
    store.read_details(lock)
    assert lock.orphans == "unreadable"


def test_a_release_whose_folder_cannot_be_cleared_of_old_ones_has_released(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.make(ONE, record())
    monkeypatch.setattr(atomic, "count_folders", raising(PermissionError(13, "denied")))
    store.retire(store.read(ONE), "epilog")
    assert store.read_all_locks() == {}
