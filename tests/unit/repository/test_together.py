# SPDX-License-Identifier: Apache-2.0
"""Labs run at the same time: an interrupt takes each of them down, and is waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exporter.child import until

TOGETHER = Path(__file__).resolve().parents[2] / "together.sh"
INTERRUPTED = 130
OVERDUE = 124
# A lab: what it puts up it takes down when it is interrupted. A process below it has 3 open, and
# tells that it is up: an interrupt before that process is there would find nothing to end.
LAB = """\
exec 3>"$1"
trap 'echo down >&3; exit 2' INT
sh -c 'echo up >&3; exec sleep 20'  # no longer, where no interrupt comes
"""
# What puts a lab into namespaces: interrupted alone, it tells nobody and waits.
AROUND = 'trap : INT; bash "$1" "$2"; exit $?'


class Told:
    """What the labs tell, and whether one of their processes is left to tell more."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._kept = os.open(path, os.O_WRONLY)  # until labs run: else there is an end at once
        os.set_blocking(self._fd, True)

    def lines(self, count: int) -> list[str]:
        """Return the next lines; wait for them."""
        text = b""
        while text.count(b"\n") < count:
            text += os.read(self._fd, 4096)
        return text.decode().splitlines()

    def rest(self) -> list[str]:
        """Return what is told until nobody is left who could."""
        os.close(self._kept)
        self._kept = -1
        text = b""
        while part := os.read(self._fd, 4096):
            text += part
        return text.decode().splitlines()

    def close(self) -> None:
        """Listen no more."""
        for fd in {self._fd, self._kept} - {-1}:
            os.close(fd)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path / "told")
    yield made
    made.close()


@pytest.fixture
def commands(tmp_path: Path) -> list[str]:
    """Return the command of a lab, and of one with something around it."""
    lab, around = tmp_path / "lab.sh", tmp_path / "around.sh"
    lab.write_text(LAB)
    around.write_text(AROUND)
    fifo = tmp_path / "told"
    return [f"bash {lab} {fifo}", f"bash {around} {lab} {fifo}"]


def started(commands: list[str], tmp_path: Path, seconds: int = 60) -> subprocess.Popen[str]:
    env = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path / "logs")}
    (tmp_path / "logs").mkdir()
    words = [str(TOGETHER), str(seconds), *commands]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, env=env, text=True)


def living(tmp_path: Path) -> list[str]:
    """Return the programs that were started for a test and still run, by their environment."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={tmp_path}/logs\0" in (folder / "environ").read_text(errors="replace"):
                found.append((folder / "comm").read_text().strip())
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_takes_every_lab_down_and_leaves_no_process(
    told: Told, commands: list[str], tmp_path: Path, number: int
) -> None:
    with started(commands, tmp_path) as together:
        assert told.lines(2) == ["up", "up"]
        together.send_signal(number)
        assert together.wait(10) == INTERRUPTED
        assert told.rest() == ["down", "down"]
        assert until(lambda: not living(tmp_path), 10)
        assert list((tmp_path / "logs").iterdir()) == []


def test_it_fails_where_one_fails_and_prints_what_each_wrote(tmp_path: Path) -> None:
    with started(["echo one", "sh -c 'echo two; exit 3'", "echo three"], tmp_path) as together:
        written, faults = together.communicate(timeout=20)
    *each, last = written.splitlines()
    assert (sorted(each), last, faults) == (["one", "three", "two"], "one; two; three", "")
    assert together.returncode == 3


def test_labs_that_pass_pass_together(tmp_path: Path) -> None:
    with started(["echo one", "echo two"], tmp_path) as together:
        written, faults = together.communicate(timeout=20)
    *each, last = written.splitlines()
    assert (sorted(each), last, faults) == (["one", "two"], "one; two", "")
    assert together.returncode == 0


def test_one_that_hangs_is_told_with_its_processes_and_taken_down(
    told: Told, commands: list[str], tmp_path: Path
) -> None:
    with started([commands[0], "echo one"], tmp_path) as together:
        assert told.lines(1) == ["up"]
        assert together.stdout is not None
        assert together.stdout.readline() == "one\n", "the one that is over"
        together.send_signal(signal.SIGALRM)  # as the clock would, at a moment that is known
        written, _ = together.communicate(timeout=20)
        assert told.rest() == ["down"]
    assert together.returncode == OVERDUE
    assert "sleep\n" in written, "what the lab runs"
    assert written.startswith("not over after 60 s")
    assert list((tmp_path / "logs").iterdir()) == []
    assert until(lambda: not living(tmp_path), 10), "the clock too"


def test_the_clock_ends_what_is_not_over_in_time(tmp_path: Path) -> None:
    with started(["sleep 20"], tmp_path, seconds=1) as together:
        written, _ = together.communicate(timeout=20)
    assert together.returncode == OVERDUE
    assert written.startswith("not over after 1 s")
