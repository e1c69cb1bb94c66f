# SPDX-License-Identifier: Apache-2.0
"""What the service manager hears: one datagram a message, and no sign of life without life."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.daemon.core.journal import SystemdNotifier, is_journal_stream, notifier_from_environ


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
