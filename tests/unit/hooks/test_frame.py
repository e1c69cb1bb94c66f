# SPDX-License-Identifier: Apache-2.0
"""What a hook tells decides nothing, whatever the job's output file is."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from gpulock import system_log
from gpulock.errors import UNKNOWN
from gpulock.hooks import frame
from gpulock.node.settings import Settings, parse_settings

REPOSITORY = Path(__file__).resolve().parents[3]
TELL = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from gpulock.hooks.frame import log_hook_line
from gpulock.node.settings import parse_settings
log_hook_line(parse_settings("SIMULATION=/\\n", "x"), "x" * 9_000, error=True)
print("over")
"""


def tell(stderr: int) -> str:
    """Have a long line logged as an error; return what was printed afterwards."""
    line = [
        sys.executable,
        "-IS",
        "-c",
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}){TELL}",
    ]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=False
    )
    return done.stdout


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
