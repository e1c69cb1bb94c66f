# SPDX-License-Identifier: Apache-2.0
"""A lab's test is run again once, after a wait that gave up, and the ledger counts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ledger

TEST = "tests/labs/sge/test_jobs.py::test_one"
CONFTEST = """
from pathlib import Path
from tests.support import ledger
from tests.support.ledger import pytest_runtest_makereport, pytest_runtest_protocol
from tests.support.ledger import pytest_terminal_summary

ledger.LEDGER = Path(__file__).with_name("ledger.tsv")
ledger.FAILED = Path(__file__).with_name("failed")
"""
TESTS = """
from pathlib import Path
import pytest
from tests.support.wait import GaveUp
pytestmark = pytest.mark.lab
runs = Path(__file__).with_name("runs")

def ran():
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    return runs.read_text()

def gives_up_once():
    if ran() == "x":
        raise GaveUp("gave up, waiting for a job\\nqstat")

def gives_up_twice():
    raise GaveUp(ran())

jobs = []

def fails_and_leaves_a_job():
    jobs.append(1)
    assert ran() == "xx"

@pytest.fixture(autouse=True)
def no_job():
    yield
    if jobs:
        raise GaveUp("gave up, waiting for no job")
"""


@pytest.mark.parametrize(
    ("tests", "code", "runs", "rows"),
    [
        (["gives_up_once"], 0, 2, 1),
        (["gives_up_twice", "gives_up_twice"], 1, 3, 2),
        (["fails_and_leaves_a_job"], 1, 1, 0),
    ],
)
def test_a_wait_that_gave_up_is_run_again_once_in_a_run_and_said(
    tmp_path: Path, tests: list[str], code: int, runs: int, rows: int
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    text = "".join(f"def test_{number}(): {test}()\n" for number, test in enumerate(tests))
    (tmp_path / "test_lab.py").write_text(TESTS + text)
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-rA", "test_lab.py"]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "GPULOCK_TARGET": "labs"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len((tmp_path / "runs").read_text())) == (code, runs), done.stdout
    path = tmp_path / "ledger.tsv"
    lines = path.read_text().splitlines() if path.exists() else []
    assert len(lines) == rows
    if code == 0:
        told = ["labs", "test_lab.py::test_0", "gave up, waiting for a job"]
        assert lines[0].split("\t")[2:] == told
        assert "RUN AGAIN: a wait gave up" in done.stdout


def test_test_with_two_lines_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.tsv"
    path.write_text("".join(f"2026-11-0{day}\tc{day}\tlabs\t{TEST}\ta job\n" for day in (1, 2)))
    assert not ledger.may_run_again(path, TEST, "a job")
    assert len(path.read_text().splitlines()) == 3


def test_no_test_has_three_lines_in_the_ledger_of_this_checkout() -> None:
    head, *rows = [line.split("\t") for line in ledger.LEDGER.read_text().splitlines()]
    assert head == ["date", "commit", "target", "test", "waited for"]
    assert all(len(row) == len(head) for row in rows)
    often = {row[3] for row in rows if ledger.lines_of(rows, row[3]) > ledger.MOST}
    assert not often, "mend the causes, then take their lines away"
