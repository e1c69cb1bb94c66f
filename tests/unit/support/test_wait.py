# SPDX-License-Identifier: Apache-2.0
"""A wait ends with what it waits for, and gives up when nothing happens any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import evidence
from tests.support.wait import GaveUp, wait_until

pytestmark = pytest.mark.real_time
QUIET = 0.2  # seconds of polls, in place of two minutes


class Lab:
    """A lab with one log and one tool."""

    name = "lab"

    def __init__(self, folder: Path) -> None:
        self.log = folder / "messages"

    def evidence(self) -> dict[str, str]:
        """Return what its tool says."""
        return {"qstat": "2 jobs"}

    def log_files(self) -> list[Path]:
        """Return its log."""
        return [self.log]


def never() -> bool:
    """Say that it has not come."""
    return False


def test_wait_goes_on_while_a_log_grows(tmp_path: Path) -> None:
    lab, polls = Lab(tmp_path), 0

    def comes_late() -> bool:
        nonlocal polls
        polls += 1
        lab.log.write_text("x" * polls)
        return polls > 100  # of a hundredth of a second at least: five times as long as QUIET

    with evidence.watched(lab):
        assert wait_until(comes_late, why="the last line", quiet=QUIET)


def test_wait_that_gives_up_tells_the_state_and_the_end_of_the_logs(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.log.write_text("".join(f"line {number}\n" for number in range(100)))
    said = r"gave up after \d+ polls in .* s, waiting for a job"
    with evidence.watched(lab), pytest.raises(GaveUp, match=said) as fault:
        wait_until(never, why="a job", quiet=QUIET)
    assert f"--- lab: qstat\n2 jobs\n--- lab: {tmp_path.name}/messages\n" in str(fault.value)
    assert "line 99" in str(fault.value) and "line 50\n" not in str(fault.value)
