# SPDX-License-Identifier: Apache-2.0
"""One process whose memory cannot be read keeps nobody: it is given up, and asked again later."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from gpulock.node import timed_read
from gpulock.node.timed_read import TimedReader
from tests.support.faults import raising
from tests.support.wait import wait_until

SHORT = 0.05  # seconds for what never comes
LONG = 20.0  # seconds for what comes: a busy machine may keep a thread from its turn


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> TimedReader:
    monkeypatch.setattr(timed_read, "SECONDS", LONG)
    return TimedReader()


def give_up(reader: TimedReader, pid: int, act: Callable[[], bytes]) -> None:
    """Read what hangs."""
    with pytest.MonkeyPatch.context() as short:
        short.setattr(timed_read, "SECONDS", SHORT)
        with pytest.raises(TimeoutError, match=f"process {pid} hangs"):
            reader.read(pid, act)


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Give what a hung process waits for; in the end it comes."""
    event = threading.Event()
    yield event
    event.set()


def hang(event: threading.Event) -> bytes:
    event.wait(30)
    return b"at last"


def read_in_the_end(reader: TimedReader, pid: int) -> bytes:
    """Read as often as it takes until the thread that hung has come back."""
    for _ in range(500):
        try:
            return reader.read(pid, lambda: b"words")
        except TimeoutError:
            threading.Event().wait(0.01)
    return b"it still hangs"


def test_what_is_read_and_what_goes_wrong_comes_back(found: TimedReader) -> None:
    assert found.read(7, lambda: b"words") == b"words"
    with pytest.raises(ProcessLookupError):
        found.read(7, raising(ProcessLookupError(3, "no such process")))
    assert found.read(7, lambda: b"more") == b"more"


def test_one_that_hangs_is_given_up_and_the_others_are_read(
    found: TimedReader, stuck: threading.Event
) -> None:
    give_up(found, 7, lambda: hang(stuck))
    assert found.read(8, lambda: b"words") == b"words"


def test_one_that_hangs_is_not_asked_again_until_it_has_answered(
    found: TimedReader, stuck: threading.Event
) -> None:
    asked: list[int] = []

    def ask() -> bytes:
        asked.append(7)
        return hang(stuck)

    for _ in range(20):
        give_up(found, 7, ask)
    give_up(found, 8, lambda: hang(stuck))
    give_up(found, 7, ask)
    assert asked == [7], "one thread waits, not twenty"
    stuck.set()
    assert read_in_the_end(found, 7) == b"words"


@pytest.mark.attack
def test_what_was_read_too_late_is_not_kept(found: TimedReader, stuck: threading.Event) -> None:
    """Tried: processes that hang while a MiB of each is read, and never again: gpulockd kept all.

    Stopped by: only which pids hang is kept, and those that came back are forgotten.
    """
    kept: list[weakref.ref[memoryview]] = []

    def read() -> bytes:
        stuck.wait(30)
        kept.append(weakref.ref(large := memoryview(b"")))
        return cast("bytes", large)

    for pid in range(7, 10):
        give_up(found, pid, read)
    stuck.set()
    wait_until(lambda: [one() for one in kept] == [None] * 3, why="what was read to be dropped")


def test_a_fork_asks_of_what_hangs_in_its_parent(
    found: TimedReader, stuck: threading.Event
) -> None:
    give_up(found, 7, lambda: hang(stuck))
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if found.read(7, lambda: b"words") == b"words" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_node_without_room_for_a_thread_is_no_fault_of_gpulock(
    found: TimedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RuntimeError, as Python has it, drained the node; with an OSError the job waits."""
    full = raising(RuntimeError("can't start new thread"))
    monkeypatch.setattr(timed_read, "start_new_thread", full)
    with pytest.raises(BlockingIOError, match="no process can be read: can't start new thread"):
        found.read(os.getpid(), lambda: b"")

    monkeypatch.undo()
    assert found.read(os.getpid(), lambda: b"read") == b"read"
