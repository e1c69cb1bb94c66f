# SPDX-License-Identifier: Apache-2.0
"""gpulockd sees locks come and go, and owners end: by the process itself, not by its number."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.daemon.core.loop import EventLoop
from gpulock.daemon.reconcile.lock_watch import EVENT, OVERFLOW, LockDirWatch, OwnerWatcher
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.deadline import clock_boottime
from gpulock.node.procfs import Proc
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
    os.close(made.fd)


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
    assert watch.changed(), "it is another one"
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
    os.close(watch.fd)


def test_events_that_the_kernel_dropped_are_a_change(
    watch: LockDirWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event without a name takes the first byte of the next one for no hidden name."""
    dropped = EVENT.pack(-1, OVERFLOW, 0, 0) + EVENT.pack(ord("."), 0, 0, 0)
    reads = iter([dropped])

    def read(*_: int) -> bytes:
        if data := next(reads, b""):
            return data
        raise BlockingIOError

    assert not watch.changed()
    monkeypatch.setattr("gpulock.daemon.reconcile.lock_watch.os.read", read)
    assert watch.changed()


PROC = Proc()


class Field:
    """Processes that end when a test says so, and what is heard of them."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.heard = 0
        self.owners = OwnerWatcher(self.loop, self._hear)
        self.processes: list[subprocess.Popen[bytes]] = []

    def _hear(self, _: float) -> None:
        self.heard += 1

    def start(self) -> int:
        started = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
        self.processes.append(started)
        return started.pid

    def end(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def follow(self, *pids: int, start: int = 0) -> None:
        report = ReconcileReport([], [])
        report.processes = [(pid, start or PROC.start(pid)) for pid in pids]
        self.owners.follow(report, PROC)

    def watched(self) -> int:
        """Return how many are watched now."""
        return sum(fd >= 0 for fd in self.owners.known.values())


@pytest.fixture
def field() -> Iterator[Field]:
    made = Field()
    yield made
    made.follow()
    for process in made.processes:
        process.kill()
        process.communicate()


def test_an_end_is_heard_once(field: Field) -> None:
    field.follow(field.start())
    field.end(0)
    field.loop.wait(clock_boottime())
    field.loop.wait(clock_boottime())
    assert field.heard == 1


def test_an_owner_that_ended_before_it_was_watched_is_heard_of_once(field: Field) -> None:
    pid = field.start()
    start = PROC.start(pid)
    field.end(0)
    field.follow(pid, start=start)
    field.follow(pid, start=start)
    assert field.heard == 1


def test_another_process_of_the_same_number_is_not_the_owner(field: Field) -> None:
    pid = field.start()
    field.follow(pid, start=PROC.start(pid) - 1)
    assert (field.heard, field.watched()) == (1, 0)


def test_locks_of_one_owner_are_one_watch_until_it_holds_nothing_any_more(field: Field) -> None:
    pid = field.start()
    field.follow(pid, pid, pid)
    assert field.watched() == 1
    field.follow()
    assert field.watched() == 0
