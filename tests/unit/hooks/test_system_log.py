# SPDX-License-Identifier: Apache-2.0
"""What a hook tells the log and the job: written or lost at once, it decides nothing."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock import system_log
from gpulock.errors import INVALID_REQUEST, LINE_BYTES, UNKNOWN, Refusal, shorten
from gpulock.hooks import frame
from gpulock.hooks.frame import log_hook_line
from gpulock.node.settings import Settings, parse_settings
from gpulock.sge import sensor
from gpulock.slurm import refuse, task
from gpulock.system_log import ERROR, FULL_SECONDS, log_to_system
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


# --- what a hook tells decides nothing, whatever the job's output file is -------------------------

TELL = f"""
import sys
sys.path.insert(0, {str(GPULOCK.parent)!r})
from gpulock.hooks.frame import log_hook_line
from gpulock.node.settings import parse_settings
log_hook_line(parse_settings("SIMULATION=/\\n", "x"), "x" * 9_000, error=True)
print("over")
"""


def tell(stderr: int) -> str:
    """Have a long line logged as an error; return what was printed afterwards."""
    line = [sys.executable, "-IS", "-c", TELL]
    return subprocess.run(
        line, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=False
    ).stdout


@pytest.mark.parametrize("filled", [0, 3_000, 1 << 20])
def test_a_hook_does_not_wait_for_whoever_reads_its_errors(filled: int) -> None:
    """The shepherd kills a hook after two minutes, and its queue is in error."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(filled // 1_000):
            os.write(write, b"x" * 1_000)
    os.set_blocking(write, True)
    try:
        assert tell(write) == "over\n"
    finally:
        os.close(read)
        os.close(write)


def test_a_hook_asks_only_whether_its_errors_can_be_written_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def full(*given: object) -> tuple[list[int], list[int], list[int]]:
        assert isinstance(given[3], (int, float))
        waits.append(given[3])
        return [], [], []

    monkeypatch.setattr(select, "select", full)

    frame.log_hook_line(parse_settings("SIMULATION=/\n", "x"), "x", error=True)

    assert waits == [0]


def test_a_closed_output_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    assert tell(write) == "over\n"
    os.close(write)


def test_a_fault_of_the_settings_is_told_to_the_administrator_and_not_to_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, str]] = []

    def read(path: str, keep: bool) -> Settings:
        return parse_settings("GUPS=8\n", path)

    def note(level: int, line: str) -> None:
        told.append((level, line))

    monkeypatch.setattr(frame, "read_settings", read)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(frame, "log_to_system", note)

    frame.read_hook_settings("x.conf")

    sentence = "gpulock: x.conf:1: unknown key 'GUPS'; correct the file"
    assert told == [(system_log.ERROR, sentence)]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "fault",
    [OSError(11, "no process"), ValueError("x"), MemoryError(), RuntimeError("no new thread")],
)
def test_what_nobody_foresaw_breaks_no_node(fault: Exception) -> None:
    assert frame.unexpected_refusal(fault).kind == UNKNOWN


# --- what a daemon of a scheduler reads from us is short, whatever a user asked for ---------------

VALUES = {
    "digits": "0." + "0" * 20_000,
    "characters of four bytes": "\U0001f600" * 5_000,
    "controls": "\n\x1b\x00" * 5_000,
    "no UTF-8": "\udcff" * 20_000,
    "a list": "gpu=1.5," * 5_000,
}
hostile = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


def sent(patch: pytest.MonkeyPatch, fd: int, act: Callable[[], object]) -> bytes:
    """Return what is written to a descriptor meanwhile."""
    read, write = os.pipe()
    real = os.write

    def redirected(to: int, data: bytes) -> int:
        return real(write if to == fd else to, data)

    with patch.context() as patched:
        patched.setattr(os, "write", redirected)
        act()
    os.close(write)
    with open(read, "rb") as file:
        return file.read()


def assert_one_short_line(line: bytes) -> None:
    """Fail unless this is one line that each daemon can read at once."""
    assert len(line) <= LINE_BYTES + len("RESULT STATE\n"), len(line)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert b"\0" not in line


@pytest.mark.parametrize("text", ["", "1.5", "x" * 40, "ä" * 20, "\udcff"])
def test_what_is_short_stays_as_it_is(text: str) -> None:
    assert shorten(text) == text


@hostile
def test_every_refusal_is_one_short_line(value: str) -> None:
    for refusal in (Refusal(INVALID_REQUEST, value, "x"), Refusal(INVALID_REQUEST, "x", value)):
        assert_one_short_line(refusal.sentence("job 12").encode() + b"\n")
        assert_one_short_line(refusal.sentence(value).encode() + b"\n")


@hostile
def test_slurmctld_is_given_short_words(value: str) -> None:
    assert_one_short_line(refuse.quote_scontrol_text(value).encode() + b"\n")


@hostile
def test_a_task_is_told_in_one_short_line(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_one_short_line(sent(monkeypatch, 1, lambda: task.print_task_message(value, 1)))


@hostile
def test_a_hooks_standard_error_is_one_short_line(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse_settings("SIMULATION=/\n", "x")
    line = Refusal(INVALID_REQUEST, value, "x").sentence("job 12")

    assert_one_short_line(
        sent(monkeypatch, 2, lambda: log_hook_line(settings, line, error=True)),
    )
    said = sent(monkeypatch, 2, lambda: log_hook_line(settings, value, error=True))
    assert len(said) <= LINE_BYTES + 1


@hostile
def test_the_load_sensor_reports_in_short_lines(
    monkeypatch: pytest.MonkeyPatch, value: str, tmp_path: Path
) -> None:
    config = tmp_path / "gpulock.conf"
    config.write_text(f"SGE_COMPLEXES=gpu {'g' * 20_000}\nSTATE_DIR={tmp_path}\n")
    answers = io.StringIO()
    host = value.replace("\n", "").replace("\0", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    monkeypatch.setattr(sys, "stdout", answers)

    sensor.main({"HOST": host}, str(config))

    for line in answers.getvalue().split("\n"):
        assert len(line.encode("utf-8", "backslashreplace")) <= LINE_BYTES
