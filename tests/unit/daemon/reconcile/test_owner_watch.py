# SPDX-License-Identifier: Apache-2.0
"""The end of an owner is learned at once, by the process itself and not by its number."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from gpulock.daemon.core.loop import EventLoop
from gpulock.daemon.reconcile.lock_watch import OwnerWatcher
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.deadline import clock_boottime
from gpulock.node.procfs import Proc

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
    made.owners.close()
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
