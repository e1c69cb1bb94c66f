# SPDX-License-Identifier: Apache-2.0
"""The tests pass on a machine that was just set up, for any user and in any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
# What an ignored SIGINT broke: each starts a program and interrupts it, or lets a terminal do it.
INTERRUPTED = (
    "tests/unit/demo/test_demo.py::test_the_demo_cleans_up_when_it_is_stopped",
    "tests/unit/cli/test_watch.py::test_it_draws_frame_over_frame_on_a_terminal_until_ctrl_c",
)


@pytest.mark.slow
def test_programs_under_test_can_be_interrupted_where_pytest_runs_in_the_background(
    tmp_path: Path,
) -> None:
    """As `nohup make test &` in a script starts it: SIGINT, SIGQUIT and SIGHUP are ignored."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", ""]
    background = 'nohup "$@" >"$LOG" 2>&1 & wait $!'
    done = subprocess.run(
        ["bash", "-c", background, "bash", *command, *INTERRUPTED],
        cwd=ROOT,
        env={**os.environ, "LOG": str(tmp_path / "log"), "PYTEST_ADDOPTS": ""},
        check=False,
    )
    assert done.returncode == 0, (tmp_path / "log").read_text()


def test_packages_name_the_machine_that_builds_them_before_anything_is_removed(
    tmp_path: Path,
) -> None:
    """pip said that a hash was missing."""
    (tmp_path / "kept").touch()
    done = subprocess.run(
        ["setarch", "linux32", sys.executable, ROOT / "packaging/build.py", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "error: nfpm is pinned for x86_64, not for " in done.stderr
    assert (tmp_path / "kept").exists()
