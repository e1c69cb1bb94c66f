# SPDX-License-Identifier: Apache-2.0
"""A wait ends with what it waits for, and gives up when nothing happens any more."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import evidence
from tests.support.wait import GaveUp, LabError, let_work, wait_ended, wait_until

pytestmark = pytest.mark.real_time
QUIET = 0.2  # seconds of polls, in place of two minutes


class Lab:
    """A lab with one log and one tool."""

    name = "lab"

    def __init__(self, folder: Path, tool: Callable[[], str] = lambda: "2 jobs") -> None:
        self.log = folder / "messages"
        self.tool = tool

    def evidence(self) -> dict[str, str]:
        """Return what its tool says."""
        return {"qstat": self.tool()}

    def log_files(self) -> list[Path]:
        """Return its log."""
        return [self.log]


def never() -> bool:
    """Say that it has not come."""
    return False


def test_wait_returns_the_first_result_that_is_something() -> None:
    answers = iter([None, False, 0])
    assert wait_until(lambda: next(answers), why="a number") == 0


def test_wait_that_gives_up_says_what_it_waited_for() -> None:
    with pytest.raises(GaveUp, match=r"gave up after \d+ polls in .* s, waiting for a job"):
        wait_until(never, why="a job", quiet=QUIET)


def test_wait_that_gives_up_asks_only_then_for_more() -> None:
    wait_until(lambda: True, why=lambda: pytest.fail("asked though it has come"))
    with pytest.raises(GaveUp, match="waiting for the state by then"):
        wait_until(never, why=lambda: "the state by then", quiet=QUIET)


def test_wait_that_gave_up_is_no_failed_assertion() -> None:
    assert issubclass(GaveUp, LabError) and not issubclass(GaveUp, AssertionError)


def test_wait_goes_on_while_a_log_grows(tmp_path: Path) -> None:
    lab, polls = Lab(tmp_path), 0

    def comes_late() -> bool:
        nonlocal polls
        polls += 1
        lab.log.write_text("x" * polls)
        return polls > 100  # of a hundredth of a second at least: five times as long as QUIET

    with evidence.watched(lab):
        assert wait_until(comes_late, why="the last line", quiet=QUIET)


def test_wait_ends_at_its_bound_though_a_log_grows(tmp_path: Path) -> None:
    lab = Lab(tmp_path)

    def writes() -> bool:
        with lab.log.open("a") as log:
            log.write("more\n")
        return False

    with evidence.watched(lab), pytest.raises(GaveUp, match="waiting for the end"):
        wait_until(writes, why="the end", quiet=QUIET, bound=2 * QUIET)


def test_wait_counts_a_poll_that_took_long_as_a_short_one() -> None:
    polls = 0

    def stalls() -> bool:
        nonlocal polls
        polls += 1
        let_work(0.6 if polls == 1 else 0)
        return polls > 1

    assert wait_until(stalls, why="the second poll", quiet=0.3)


def test_wait_that_gives_up_tells_the_state_and_the_end_of_the_logs(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.log.write_text("".join(f"line {number}\n" for number in range(100)))
    with evidence.watched(lab), pytest.raises(GaveUp) as fault:
        wait_until(never, why="a job", quiet=QUIET)
    assert f"--- lab: qstat\n2 jobs\n--- lab: {tmp_path.name}/messages\n" in str(fault.value)
    assert "line 99" in str(fault.value) and "line 50\n" not in str(fault.value)


def test_lab_that_is_down_is_not_asked(tmp_path: Path) -> None:
    with evidence.watched(Lab(tmp_path)):
        pass
    with pytest.raises(GaveUp) as fault:
        wait_until(never, why="a job", quiet=QUIET)
    assert "qstat" not in str(fault.value)


def test_tool_that_fails_hides_no_failure(tmp_path: Path) -> None:
    def fails() -> str:
        raise LabError("qmaster does not answer")

    with evidence.watched(Lab(tmp_path, fails)), pytest.raises(GaveUp) as fault:
        wait_until(never, why="a job", quiet=QUIET)
    assert "waiting for a job" in str(fault.value)
    assert "it cannot be asked: qmaster does not answer" in str(fault.value)


def test_evidence_is_one_folder_with_whole_logs(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    lab, folder = Lab(tmp_path / "spool"), tmp_path / "failed"
    (folder / "of an earlier run").mkdir(parents=True)
    lab.log.write_text("first\n" * 100)
    with evidence.watched(lab):
        assert evidence.keep(folder)
    kept = {str(path.relative_to(folder)): path.read_text() for path in folder.glob("*/*")}
    assert kept == {"lab/qstat.txt": "2 jobs", "lab/00-spool-messages": "first\n" * 100}


def test_evidence_of_no_lab_is_no_folder(tmp_path: Path) -> None:
    assert not evidence.keep(tmp_path / "failed")
    assert not (tmp_path / "failed").exists()


def test_processes_have_ended_as_zombies_or_gone() -> None:
    with subprocess.Popen(["sleep", "0.2"]) as zombie, subprocess.Popen(["true"]) as gone:
        gone.wait()
        wait_ended([zombie.pid, gone.pid], why="both to end")
        assert zombie.returncode is None  # nobody has reaped it
        assert zombie.wait(0) == 0
    wait_ended([], why="nothing")


def test_process_that_runs_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.support.wait.wait_until.__kwdefaults__", {"quiet": QUIET, "bound": 9}
    )
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            with pytest.raises(GaveUp, match="waiting for its end"):
                wait_ended([process.pid], why="its end", quiet=QUIET)
        finally:
            process.kill()
