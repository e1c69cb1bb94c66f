# SPDX-License-Identifier: Apache-2.0
"""A line for the system's log is written, or lost at once: a stuck reader holds up no hook."""

from __future__ import annotations

import os
import re
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.system_log import ERROR, FULL_SECONDS, LOG_BYTES, log_to_system
from tests.layers import HOT

FORM = r"<27>[A-Z][a-z]{2} [ 123]\d \d\d:\d\d:\d\d gpulock\[(\d+)\]: (.*)"  # as syslog(3) has it
ROUNDING, LINES = 1e-6, 5  # seconds; lines
GPULOCK = Path(__file__).resolve().parents[3] / "gpulock"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[socket.socket]:
    """Give a test a log that reads when the test does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
        reader.bind(str(tmp_path / "log"))
        reader.settimeout(0)
        yield reader


def received(log: socket.socket) -> bytes:
    """Return one line that was written."""
    return log.recv(1 << 16)


def write(log: socket.socket, line: str) -> None:
    log_to_system(ERROR, line, path=log.getsockname())


def test_a_line_has_the_form_of_syslog(log: socket.socket) -> None:
    write(log, "job 12: granted 0")

    found = re.fullmatch(FORM, received(log).decode())
    assert found
    assert found.groups() == (str(os.getpid()), "job 12: granted 0")


def fill(log: socket.socket) -> None:
    """Write lines until the log has no room for another."""
    writers: list[socket.socket] = []
    try:
        while True:
            writers.append(socket.socket(socket.AF_UNIX, log.type))
            writers[-1].setblocking(False)
            writers[-1].connect(log.getsockname())
            writers[-1].send(b"first")
    except BlockingIOError:
        pass
    for one in writers:
        one.close()


def test_a_log_that_nobody_reads_holds_up_nobody(
    log: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """syslog(3) waits in send(2), which SIGALRM does not end: the claim was made already."""
    fill(log)
    real, waits = select.select, list[float]()

    def wait(reading: Any, writing: Any, failing: Any, seconds: float) -> Any:
        waits.append(seconds)
        return real(reading, writing, failing, 0)

    monkeypatch.setattr(select, "select", wait)
    for _ in range(LINES):
        write(log, "x" * 3_000)

    assert sum(waits) <= LINES * FULL_SECONDS + ROUNDING
    assert received(log) == b"first"


def test_a_log_that_is_full_for_a_moment_loses_no_line(
    log: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks come in bursts, and a socket takes ten lines."""
    fill(log)
    real = select.select

    def read_meanwhile(*given: Any) -> Any:
        received(log)
        return real(*given)

    monkeypatch.setattr(select, "select", read_meanwhile)
    write(log, "seen")
    lines = [received(log)]
    while lines[-1] == b"first":
        lines.append(received(log))
    assert lines[-1].endswith(b"]: seen")


def test_a_log_that_is_read_again_has_the_lines_that_come_then(log: socket.socket) -> None:
    fill(log)
    write(log, "lost")
    while True:
        try:
            assert received(log) in (b"first", b"")
        except BlockingIOError:
            break

    write(log, "seen")

    assert received(log).endswith(b"]: seen")


@pytest.mark.parametrize("line", ["x" * 100_000, "\udcff" * 10_000, "a\0b"])
def test_a_line_of_any_bytes_is_written_and_short(log: socket.socket, line: str) -> None:
    write(log, line)

    assert 0 < len(received(log)) < LOG_BYTES + 100


@pytest.mark.parametrize("kind", ["none", "file", "closed", "fifo"])
def test_a_log_that_is_none_is_no_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "file":
        path.touch()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "closed":
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
            gone.bind(str(path))

    log_to_system(ERROR, "lost", path=str(path))


def test_no_other_hot_module_opens_a_socket() -> None:
    """A daemon that does not answer, or a name service, would hold up each hook.

    The site's own hook cannot do without the latter: its user is a name.
    """
    opens = re.compile(r"^\s*(import|from) (_socket|socket|pwd|grp)\b", re.MULTILINE)
    modules = [path for package in HOT for path in (GPULOCK / package).glob("*.py")]
    assert [one.name for one in modules if opens.search(one.read_text())] == [
        "system_log.py",
        "site_hook.py",
    ]
