# SPDX-License-Identifier: Apache-2.0
"""gpulockd sees locks come and go."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.daemon.reconcile.lock_watch import HEAD, LockDirWatch, parse_inotify_events
from gpulock.store.events import OPEN, note_event
from gpulock.store.locks import LockStore
from gpulock.store.verdicts import write_verdicts
from tests.support.locks import place_lock, retire_lock
from tests.support.trees import bus, record


@pytest.fixture
def store(tmp_path: Path) -> LockStore:
    made = LockStore(str(tmp_path / "run"))
    make_folders(made)
    return made


def make_folders(store: LockStore) -> None:
    """Make what a first claim makes, as far as it is not there."""
    store.check(make=True)
    for folder in (store.locks_dir, store.claims_dir, store.finished_dir):
        Path(folder).mkdir(exist_ok=True)


@pytest.fixture
def watch(store: LockStore) -> Iterator[LockDirWatch]:
    made = LockDirWatch()
    made.follow(store)
    yield made
    made.close()


def test_a_quiet_directory_is_no_change(watch: LockDirWatch) -> None:
    assert not watch.changed()
    assert watch.fault == ""


def test_a_lock_that_is_made_is_seen_once(watch: LockDirWatch, store: LockStore) -> None:
    place_lock(store, bus(0), record())
    assert watch.changed()
    assert not watch.changed()


def test_a_lock_that_is_freed_is_seen(watch: LockDirWatch, store: LockStore) -> None:
    place_lock(store, bus(0), record())
    watch.changed()
    retire_lock(store, store.read(bus(0)), "epilog")
    assert watch.changed()


def test_a_record_that_somebody_removes_is_seen(watch: LockDirWatch, store: LockStore) -> None:
    """Its lock may be removed next: both at once, and nothing is left of the claim."""
    own = record()
    place_lock(store, bus(0), own)
    watch.changed()
    shutil.rmtree(f"{store.claims_dir}/{own.token}")
    assert watch.changed()


def test_events_and_verdicts_wake_nobody(watch: LockDirWatch, store: LockStore) -> None:
    note_event(store.path, OPEN)
    write_verdicts(store.path, {}, "boot")
    assert not watch.changed()


def test_the_loss_of_the_directory_is_seen(watch: LockDirWatch, store: LockStore) -> None:
    shutil.rmtree(store.path)
    assert watch.changed()


def test_a_directory_that_was_moved_away_is_seen(watch: LockDirWatch, store: LockStore) -> None:
    Path(store.path).rename(f"{store.path}.old")
    assert watch.changed()


def test_in_a_recreated_directory_locks_are_seen_again(
    watch: LockDirWatch, store: LockStore
) -> None:
    shutil.rmtree(store.path)
    make_folders(store)
    watch.follow(store)
    watch.changed()
    place_lock(store, bus(0), record())
    assert watch.changed()


def test_a_directory_moved_away_is_watched_no_longer(watch: LockDirWatch, store: LockStore) -> None:
    old = LockStore(f"{store.path}.old")
    Path(store.path).rename(old.path)
    make_folders(store)
    watch.follow(store)
    watch.changed()
    place_lock(old, bus(0), record())
    assert not watch.changed()


def test_a_missing_directory_is_no_fault(tmp_path: Path) -> None:
    watch = LockDirWatch()
    watch.follow(LockStore(str(tmp_path / "none")))
    assert watch.fault == ""
    watch.close()


def test_a_file_in_place_of_a_directory_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    watch = LockDirWatch()
    watch.follow(LockStore(str(tmp_path / "run")))
    assert "Not a directory" in watch.fault
    watch.close()


def test_events_of_a_read_are_told_apart() -> None:
    data = HEAD.pack(1, 0x100, 0, 16) + b"0000:3b:00.0".ljust(16, b"\0") + HEAD.pack(2, 0x400, 0, 0)
    assert parse_inotify_events(data) == [(1, 0x100, "0000:3b:00.0"), (2, 0x400, "")]
