# SPDX-License-Identifier: Apache-2.0
"""Locks that are remembered: whatever changes them is seen, and nothing is read in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpulock_exporter.state.local_state import (
    SETTLED,
    LockCache,
    read_local_state,
)

from gpulock.alloc.node_view import read_detailed_locks
from gpulock.deadline import clock_boottime
from gpulock.store import boot
from gpulock.store.locks import Lock, LockStore
from tests.support.locks import change_record, place_lock, retire_lock
from tests.support.trees import Box, bus, record

PAST = 1_500_000_000  # epoch seconds: what was made then is settled
HOUR = 3600 * SETTLED  # nanoseconds; a virtual machine that wakes up sets its clock
FIRST, OTHER, LATER = record().token, "b" * 16, "c" * 16

CHANGES: dict[str, Callable[[LockStore], object]] = {
    "made": lambda store: place_lock(store, bus(2), record(token=LATER, devices=(bus(2),))),
    "half made": lambda store: os.mkdir(f"{store.locks_dir}/{bus(3)}"),
    "rewritten": lambda store: change_record(store, bus(0), record(token=LATER)),
    "written over": lambda store: write_over(store, "user=alice", "user=bob"),
    "of no known version": lambda store: write_over(store, "gpulock-owner 1", "gpulock-owner 9"),
    "draining": lambda store: store.mark_draining(FIRST),
    "orphans": lambda store: store.mark_orphans(bus(0), "process 7"),
    "seen": lambda store: store.mark_seen(FIRST),
    "first anchor": lambda store: store.anchor(FIRST, 8, 9, 20002),
    "one more anchor": lambda store: store.anchor(OTHER, 8, 9, 20002),
    "released": lambda store: retire_lock(store, store.read_all_locks()[bus(0)], "released"),
}


def write_over(store: LockStore, old: str, new: str) -> None:
    """Write over the record of the first claim in place, and over its copy."""
    for path in (f"{store.claims_dir}/{FIRST}/record", f"{store.locks_dir}/{bus(0)}/owner"):
        Path(path).write_text(Path(path).read_text().replace(old, new))


class Reader:
    """Locks as an exporter remembers them; `reads` counts how often they were read."""

    def __init__(self, root: Path, now: Callable[[], int] = time.time_ns) -> None:
        self.box = Box(root)
        node = self.box.node()
        node.store.check(make=True)
        boot.begin_boot(node.store, node.settings.state_dir, node.boot_id, node.name)
        self.store = node.store
        place_lock(self.store, bus(0), record())
        place_lock(self.store, bus(1), record(token=OTHER, devices=(bus(1),)))
        self.store.anchor(OTHER, 700, 7, 20001)
        self.reads = 0
        self._remembered = LockCache(self.count, now)

    def count(self, store: LockStore) -> dict[str, Lock]:
        """Read all locks, and count it."""
        self.reads += 1
        return read_detailed_locks(store)

    def age(self) -> None:
        """Let all there is have been made long ago."""
        for top in (self.store.locks_dir, self.store.claims_dir):
            for folder, folders, files in os.walk(top):
                for name in (*folders, *files):
                    os.utime(f"{folder}/{name}", (PAST, PAST))

    def read(self) -> dict[str, Lock]:
        """Return the locks as the exporter has them now."""
        return self._remembered.locks(self.store)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """Return locks that were read long after they were made."""
    found = Reader(tmp_path, lambda: time.time_ns() + HOUR)
    found.age()
    found.read()
    return found


def told(held: dict[str, Lock]) -> list[tuple[object, ...]]:
    """Return what can change of locks."""
    return [
        (name, one.owner and vars(one.owner), one.orphans, one.seen, one.anchors, one.fault)
        for name, one in sorted(held.items())
    ]


def test_locks_that_stand_are_read_once(reader: Reader) -> None:
    for _ in range(3):
        assert told(reader.read()) == told(read_detailed_locks(reader.store))
    assert reader.reads == 1


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_once(change: str, reader: Reader) -> None:
    before = told(reader.read())
    CHANGES[change](reader.store)
    after = told(reader.read())
    assert after == told(read_detailed_locks(reader.store))
    assert after != before


def test_what_was_made_a_moment_ago_is_read_again(tmp_path: Path) -> None:
    reader = Reader(tmp_path, lambda: 0)  # nothing can have been made before
    for _ in range(3):
        reader.read()
    assert reader.reads == 3


@pytest.mark.parametrize("text", [None, "gpulock-owner 99\n"])
def test_a_lock_whose_owner_is_not_known_is_read_again(text: str | None, reader: Reader) -> None:
    os.mkdir(f"{reader.store.locks_dir}/{bus(2)}")
    if text is not None:
        Path(f"{reader.store.locks_dir}/{bus(2)}/owner").write_text(text)
    reader.age()
    for _ in range(3):
        assert reader.read()[bus(2)].owner is None
    assert reader.reads == 4


def test_locks_that_cannot_be_read_any_more_are_not_known(reader: Reader) -> None:
    node, remembered = reader.box.node(), LockCache(read_detailed_locks)
    assert read_local_state(node, clock_boottime(), remembered).locks
    os.rename(reader.store.locks_dir, f"{reader.store.path}/away")
    Path(reader.store.locks_dir).write_text("")
    assert read_local_state(node, clock_boottime(), remembered).locks is None
