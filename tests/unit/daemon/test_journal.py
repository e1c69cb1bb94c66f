# SPDX-License-Identifier: Apache-2.0
"""What gpulockd says: an event each time, a state when it begins and when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gpulock.daemon.core.journal import ERROR, LENGTH, QUIET, DaemonJournal
from tests.support.clock import VirtualClock


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


def test_a_log_that_cannot_be_written_stops_nobody() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        DaemonJournal(full, levels=True).say(ERROR, "nobody hears this")
    finally:
        os.close(full)


@pytest.mark.parametrize(
    ("levels", "text", "line"),
    [
        (True, "the disk is full", "<3>the disk is full"),
        (False, "the disk is full", "gpulockd: the disk is full"),
        (True, "token\n<0>the end is near\x1b[2J", "<3>token?<0>the end is near?[2J"),
        (True, "x" * 100_000, f"<3>{'x' * LENGTH}"),
    ],
)
def test_a_line_has_its_level_or_its_author_an_end_and_nothing_forged(
    pipe: tuple[int, int], levels: bool, text: str, line: str
) -> None:
    DaemonJournal(pipe[1], levels=levels, quiet=True).say(ERROR, text)
    assert read(pipe[0]) == [line]


def test_what_lasts_is_said_once_and_so_are_another_text_and_its_end(
    pipe: tuple[int, int], clock: VirtualClock
) -> None:
    journal = DaemonJournal(pipe[1], levels=True)
    said: list[list[str]] = []
    for a, b in (("a of pid 7", "b"), ("a of pid 8", "another b"), ("a of pid 9", "b in a third")):
        journal.log_changes("faults", {"a": a, "b": b}, ERROR)
        journal.log_changes("locks", {"b": b})
        journal.log_state("disk", "it is full")  # of another part, which disturbs none
        said.append(read(pipe[0]))
        clock.now += QUIET / 2
    journal.log_changes("faults", {"a": "a of pid 9"}, ERROR)
    said.append(read(pipe[0]))
    assert said == [
        ["<3>a of pid 7", "<3>b", "<4>b", "<4>it is full"],
        [],
        ["<3>b in a third"],
        ["<6>no longer: b in a third"],
    ]
