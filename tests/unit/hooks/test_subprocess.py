# SPDX-License-Identifier: Apache-2.0
"""A program of a scheduler's that is asked: its code, its words, and never longer than allowed."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN
from gpulock.hooks import subprocess
from gpulock.hooks.subprocess import SchedulerProgram
from tests.support.clock import VirtualClock
from tests.support.faults import refusal


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No child and no descriptor may be left by any of these tests."""
    before, children = len(os.listdir("/proc/self/fd")), own_children()
    yield
    assert own_children() <= children  # another test may have left one to this process
    assert len(os.listdir("/proc/self/fd")) <= before  # other tests' may be closed meanwhile


def own_children() -> set[str]:
    """Return the children of every thread of this process, dead ones too."""
    files = Path("/proc/self/task").glob("*/children")
    return {child for file in files for child in file.read_text().split()}


def program(root: Path, body: str, **env: str) -> SchedulerProgram:
    path = root / "ask"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return SchedulerProgram(str(path), {"PATH": "/usr/bin:/bin", **env}, "look at it")


def answer(root: Path, body: str, *words: str, seconds: float = 5) -> tuple[int, bytes]:
    return program(root, body).answer(list(words), Deadline(seconds))


def too_late(root: Path, body: str, seconds: float = 5) -> None:
    """Expect that a program is given up."""
    found = refusal(lambda: answer(root, body, seconds=seconds))
    assert (found.kind, found.do) == (UNKNOWN, "look at it")
    assert found.why.startswith("ask")


WORDS = ("a b", "", "$(id)", "-x\ny", "ä")


@pytest.mark.parametrize(
    ("body", "code", "output"),
    [
        ("echo out; echo err >&2; echo more; exit 0", 0, "out\nerr\nmore\n"),
        ("exit 255", 255, ""),
        (f"echo x; kill -{signal.SIGKILL:d} $$", -signal.SIGKILL, "x\n"),
        (f"kill -{signal.SIGTERM:d} $$", -signal.SIGTERM, ""),
        ('for word in "$@"; do printf "[%s]" "$word"; done', 0, "[a b][][$(id)][-x\ny][ä]"),
        ("cat; echo end", 0, "end\n"),
        ("head -c 1000000 /dev/zero", 0, "\0" * 1000000),
    ],
    ids=["words", "code", "killed", "ended", "arguments", "no input", "a long answer"],
)
def test_its_exit_code_and_all_its_words_are_the_answer(
    tmp_path: Path, body: str, code: int, output: str
) -> None:
    assert answer(tmp_path, body, *WORDS) == (code, output.encode())


def test_its_environment_and_its_files_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD_X", "evil")
    with (tmp_path / "secret").open("w"):
        asked = program(tmp_path, "env; ls -l /proc/self/fd", SLURM_CONF="/c")
        _, output = asked.answer([], Deadline(5))
    assert b"SLURM_CONF=/c\n" in output and b"/dev/null" in output
    assert b"LD_PRELOAD_X" not in output and b"secret" not in output


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ("exec sleep 600", 5),
        ("exec sleep 600", 0),
        ("echo x; exec >&- 2>&-; exec sleep 600", 5),
    ],
    ids=["hangs", "no time", "answers and hangs"],
)
def test_one_that_does_not_end_is_ended_at_the_deadline(
    tmp_path: Path, body: str, seconds: float
) -> None:
    too_late(tmp_path, body, seconds)


class AlwaysReady:
    """A poll that always finds more to read, which takes some time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def register(self, fd: int, _: int) -> None:
        self.fd = fd

    def poll(self, _: float) -> list[tuple[int, int]]:
        self._clock.now += 0.001
        return [(self.fd, select.POLLIN)]


def test_one_that_never_stops_talking_is_ended_at_the_deadline(
    tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "poll", lambda: AlwaysReady(clock))
    found = refusal(lambda: answer(tmp_path, "exec cat /dev/zero", seconds=0.01))
    assert (found.kind, "in time" in found.why) == (UNKNOWN, True)


def test_one_whose_own_child_goes_on_is_not_waited_for(tmp_path: Path) -> None:
    too_late(tmp_path, f"sleep 600 & echo $! >{tmp_path}/child")
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_one_that_floods_us_is_ended_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "ANSWER_LIMIT", 1 << 16)
    too_late(tmp_path, "exec cat /dev/zero", 30)


@pytest.mark.parametrize("spoil", ["gone", "mode", "interpreter", "folder"])
def test_one_that_cannot_be_started_is_unknown(tmp_path: Path, spoil: str) -> None:
    asked = program(tmp_path, "exit 0")
    path = tmp_path / "ask"
    if spoil == "gone":
        path.unlink()
    elif spoil == "mode":
        path.chmod(0o600)
    elif spoil == "interpreter":
        path.write_text("#!/no/such/interpreter\n")
    else:
        path.unlink()
        path.mkdir()
    found = refusal(lambda: asked.answer([], Deadline(5)))
    assert (found.kind, str(path) in found.why) == (UNKNOWN, True)


def test_one_that_is_reaped_by_somebody_else_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.kill

    def first(pid: int, number: int) -> None:
        real(pid, number)
        os.waitpid(pid, 0)

    monkeypatch.setattr(os, "kill", first)
    too_late(tmp_path, "exec sleep 600")


def test_one_that_even_sigkill_does_not_end_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is where its file system hangs: the process ends when that answers again."""
    left: list[int] = []

    def keep(pid: int, number: int) -> None:
        left.append(pid)

    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", keep)
        too_late(tmp_path, "exec sleep 600")
    (child,) = left
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
