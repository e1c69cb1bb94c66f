# SPDX-License-Identifier: Apache-2.0
"""What the service manager hears of the exporter, and when it hears nothing more."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpulock_exporter.app.watchdog import Heartbeat, start_watchdog, take_notifier

from gpulock.daemon.core.journal import SystemdNotifier


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.settimeout(10)
        yield found


def heard(listener: socket.socket) -> list[str]:
    """Return what has come by now."""
    found: list[str] = []
    listener.setblocking(False)
    try:
        while True:
            found.append(listener.recv(4096).decode())
    except BlockingIOError:
        return found


def pulse(proc: Path, state: str) -> Heartbeat:
    """Return the pulse of this thread, as it would be in a state of the kernel's."""
    stat = proc / str(os.getpid()) / "task" / str(threading.get_native_id()) / "stat"
    stat.parent.mkdir(parents=True)
    stat.write_text(f"77 (a) b) {state} 1 77 77" + " 0" * 20 + "\n")
    return Heartbeat(str(proc))


def test_pings_are_sent_only_while_all_is_well(
    listener: socket.socket,
) -> None:
    answers = iter([True, False, True, False])
    over = threading.Event()

    def is_well() -> bool:
        found = next(answers, None)
        if found is None:
            over.set()
            threading.Event().wait()  # the thread ends with the tests
        return bool(found)

    start_watchdog(SystemdNotifier(listener.getsockname(), 0.003), is_well)
    assert over.wait(10)
    assert heard(listener) == ["WATCHDOG=1"] * 2


def test_what_it_wants_to_hear_is_in_the_environment_and_meant_for_no_child() -> None:
    given = {"NOTIFY_SOCKET": "@abc", "WATCHDOG_USEC": "90000000", "WATCHDOG_PID": "7", "A": "b"}
    assert take_notifier(dict(given), 8).watchdog == 0.0
    assert take_notifier(given, 7).watchdog == 90.0
    assert given == {"A": "b"}


def test_a_thread_that_went_round_lately_goes_on(tmp_path: Path) -> None:
    found = pulse(tmp_path, "S")
    found.beat()
    assert found.goes_on(1e9)


@pytest.mark.parametrize(("state", "goes_on"), [("S", False), ("R", False), ("D", True)])
def test_one_that_did_not_hangs_unless_the_kernel_holds_it(
    tmp_path: Path, state: str, goes_on: bool
) -> None:
    assert pulse(tmp_path, state).goes_on(-1) is goes_on
