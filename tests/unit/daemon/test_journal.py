# SPDX-License-Identifier: Apache-2.0
"""What gpulockd says: an event each time, a state when it begins and ends; and how it lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.daemon.core.journal import (
    ERROR,
    LENGTH,
    QUIET,
    DaemonJournal,
    SystemdNotifier,
    is_journal_stream,
    notifier_from_environ,
)
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


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


def heard(manager: socket.socket) -> list[str]:
    found: list[str] = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


def test_a_reload_says_since_when(manager: socket.socket) -> None:
    SystemdNotifier(manager.getsockname()).reloading()
    (message,) = heard(manager)
    first, _, second = message.partition("\n")
    assert first == "RELOADING=1"
    assert int(second.removeprefix("MONOTONIC_USEC=")) > 0


def test_life_is_told_three_times_within_the_limit(manager: socket.socket) -> None:
    notify = SystemdNotifier(manager.getsockname(), watchdog=30.0)
    for now in range(100, 130):
        if now >= notify.due:
            notify.alive(float(now))
    assert heard(manager) == ["WATCHDOG=1"] * 3


def test_an_abstract_address_is_understood() -> None:
    name = f"gpulock-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        listening.setblocking(False)
        SystemdNotifier(f"@{name}").ready("well")
        assert heard(listening) == ["READY=1\nSTATUS=well"]


def test_a_manager_that_does_not_listen_stops_nobody(tmp_path: Path) -> None:
    SystemdNotifier(str(tmp_path / "nobody")).ready("well")


def test_the_watchdog_of_another_process_is_not_ours() -> None:
    asked = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "77"}
    assert notifier_from_environ(asked, 77).watchdog == 30.0
    assert notifier_from_environ(asked, 78).watchdog == 0.0
    assert notifier_from_environ({"WATCHDOG_USEC": "soon"}, 77).watchdog == 0.0


def test_the_journal_is_recognised_by_the_file_that_stderr_is(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        info = os.fstat(file.fileno())
        named = {"JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino}"}
        assert is_journal_stream(named, file.fileno())
        assert not is_journal_stream({"JOURNAL_STREAM": f"{info.st_dev}:1"}, file.fileno())
        assert not is_journal_stream({}, file.fileno())
