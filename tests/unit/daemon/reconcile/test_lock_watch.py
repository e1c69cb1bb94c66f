# SPDX-License-Identifier: Apache-2.0
"""gpulockd sees locks come and go."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.daemon.reconcile.lock_watch import EVENT, OVERFLOW, LockDirWatch
from gpulock.store.event_kinds import OPEN
from gpulock.store.events import note_event
from gpulock.store.locks import LockStore
from gpulock.store.verdicts import write_verdicts
from tests.support.locks import place_lock, retire_lock
from tests.support.trees import bus, record


def make_folders(store: LockStore) -> None:
    """Make what a first claim makes, as far as it is not there."""
    store.check(make=True)
    for folder in (store.locks_dir, store.claims_dir, store.finished_dir):
        Path(folder).mkdir(exist_ok=True)


@pytest.fixture
def store(tmp_path: Path) -> LockStore:
    """Return a node's folders, in which one device is held."""
    made = LockStore(str(tmp_path / "run"))
    make_folders(made)
    place_lock(made, bus(0), record(token="held"))
    return made


@pytest.fixture
def watch(store: LockStore) -> Iterator[LockDirWatch]:
    made = LockDirWatch()
    made.follow(store)
    yield made
    made.close()


def write_what_wakes_nobody(store: LockStore) -> None:
    note_event(store.path, OPEN)
    write_verdicts(store.path, {}, "boot")


@pytest.mark.parametrize(
    ("act", "seen"),
    [
        (lambda _: None, False),
        (write_what_wakes_nobody, False),
        (lambda store: Path(store.locks_dir, ".hidden").mkdir(), False),
        (lambda store: place_lock(store, bus(1), record()), True),
        (lambda store: retire_lock(store, store.read(bus(0)), "epilog"), True),
        # its lock may be removed next: both at once, and nothing is left of the claim
        (lambda store: shutil.rmtree(f"{store.claims_dir}/held"), True),
        (lambda store: shutil.rmtree(store.path), True),
        (lambda store: Path(store.path).rename(f"{store.path}.old"), True),
    ],
)
def test_what_concerns_a_claim_is_seen_once(
    watch: LockDirWatch, store: LockStore, act: Callable[[LockStore], object], seen: bool
) -> None:
    act(store)
    assert (watch.changed(), watch.changed(), watch.fault) == (seen, False, "")


def test_in_a_recreated_directory_locks_are_seen_and_in_the_old_one_no_longer(
    watch: LockDirWatch, store: LockStore
) -> None:
    old = LockStore(f"{store.path}.old")
    Path(store.path).rename(old.path)
    make_folders(store)
    watch.follow(store)
    watch.changed()
    place_lock(old, bus(1), record())
    assert not watch.changed()
    place_lock(store, bus(1), record())
    assert watch.changed()


@pytest.mark.parametrize(("kind", "fault"), [("missing", ""), ("a file", "Not a directory")])
def test_a_missing_directory_is_no_fault_and_a_file_in_its_place_is(
    tmp_path: Path, kind: str, fault: str
) -> None:
    if kind == "a file":
        (tmp_path / "run").touch()
    watch = LockDirWatch()
    watch.follow(LockStore(str(tmp_path / "run")))
    assert fault in watch.fault and bool(watch.fault) == bool(fault)
    watch.close()


def test_events_that_the_kernel_dropped_are_a_change(
    watch: LockDirWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind one without a name comes one of a watch whose number begins with a dot's code."""
    dropped = EVENT.pack(-1, OVERFLOW, 0, 0) + EVENT.pack(ord("."), 0, 0, 0)
    reads = iter([dropped])

    def read(*_: int) -> bytes:
        if data := next(reads, b""):
            return data
        raise BlockingIOError

    assert not watch.changed()
    monkeypatch.setattr("gpulock.daemon.reconcile.lock_watch.os.read", read)
    assert watch.changed()
