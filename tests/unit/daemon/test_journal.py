# SPDX-License-Identifier: Apache-2.0
"""What gpulockd says: an event each time, a state when it begins and when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gpulock.daemon.core.journal import ERROR, DaemonJournal


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for fd in ends:
        os.close(fd)


def read(fd: int) -> list[str]:
    try:
        return os.read(fd, 1 << 16).decode().splitlines()
    except BlockingIOError:
        return []


def test_a_line_has_its_level_for_the_journal(pipe: tuple[int, int]) -> None:
    DaemonJournal(pipe[1], levels=True).say(ERROR, "the disk is full")
    assert read(pipe[0]) == ["<3>the disk is full"]


def test_elsewhere_a_line_says_who_speaks(pipe: tuple[int, int]) -> None:
    DaemonJournal(pipe[1], quiet=True).say(ERROR, "the disk is full")
    assert read(pipe[0]) == ["gpulockd: the disk is full"]


def test_nobody_can_forge_a_line(pipe: tuple[int, int]) -> None:
    DaemonJournal(pipe[1], levels=True).say(ERROR, "token\n<0>the end is near\x1b[2J")
    assert read(pipe[0]) == ["<3>token?<0>the end is near?[2J"]


def test_a_line_has_an_end(pipe: tuple[int, int]) -> None:
    DaemonJournal(pipe[1], levels=True).say(ERROR, "x" * 100_000)
    assert [len(line) for line in read(pipe[0])] == [603]


def test_what_lasts_is_said_once(pipe: tuple[int, int]) -> None:
    journal = DaemonJournal(pipe[1], levels=True)
    for _ in range(3):
        journal.log_changes("locks", {"a": "a is of nobody"})
    assert read(pipe[0]) == ["<4>a is of nobody"]


def test_the_end_of_what_lasted_is_said(pipe: tuple[int, int]) -> None:
    journal = DaemonJournal(pipe[1], levels=True)
    journal.log_changes("locks", {"a": "a is of nobody", "b": "b is of nobody"})
    journal.log_changes("locks", {"b": "b is of somebody else"})
    assert read(pipe[0])[2:] == ["<6>no longer: a is of nobody"]


def test_the_parts_do_not_disturb_each_other(pipe: tuple[int, int]) -> None:
    journal = DaemonJournal(pipe[1], levels=True)
    journal.log_changes("locks", {"a": "a is of nobody"})
    journal.log_changes("disk", {})
    journal.log_changes("locks", {"a": "a is of nobody"})
    assert len(read(pipe[0])) == 1


def test_a_log_that_cannot_be_written_stops_nobody() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        DaemonJournal(full, levels=True).say(ERROR, "nobody hears this")
    finally:
        os.close(full)
