# SPDX-License-Identifier: Apache-2.0
"""The tests pass on a machine that was just set up, for any user and in any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.reach import NOBODY, unreachable_folder

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
# What an ignored SIGINT broke: each starts a program and interrupts it, or lets a terminal do it.
INTERRUPTED = (
    "tests/unit/cli/test_main.py::test_the_demo_cleans_up_when_it_is_stopped",
    "tests/unit/cli/test_watch.py::test_a_key_ends_it_and_the_terminal_is_as_before",
    "tests/unit/cli/test_run.py::test_ctrl_c_leaves_the_line",
    "tests/unit/repository/test_together.py",
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


@pytest.mark.root
@pytest.mark.parametrize("seconds", [30, 10**6])
def test_a_machine_may_be_younger_or_older_than_it_is(seconds: int) -> None:
    read = "import time; print(time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic())"
    done = subprocess.run(
        [TESTS / "booted.sh", str(seconds), sys.executable, "-c", read],
        capture_output=True,
        text=True,
        check=True,
    )
    boottime, monotonic = map(float, done.stdout.split())
    assert seconds <= boottime < seconds + 60
    assert monotonic <= boottime + 1  # a machine that slept has two ages, and this is the younger


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


def test_make_test_asks_nothing_and_says_which_tests_it_leaves_out() -> None:
    commands = dry_run("test")
    assert "consent.sh" not in commands
    assert "As root: make labs" in commands
    assert "consent.sh" in dry_run("labs")


def test_an_ordinary_user_can_run_make_test() -> None:
    assert "booted.sh" not in dry_run("test", "AS_ROOT=")
    assert "booted.sh" in dry_run("test", "AS_ROOT=0")


def test_a_missing_compiler_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    done = subprocess.run(
        ["/bin/bash", TESTS / "tools.sh", "make check"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("make check needs gcc strace: apt-get install gcc ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("target", ["check", "unit", "slow", "sweep"])
def test_a_target_looks_for_its_programs_before_anything_else(target: str) -> None:
    """The sweep installed strace, and asked nobody."""
    done = subprocess.run(
        ["make", "-n", target], cwd=TESTS.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f'tests/tools.sh "make {target}"\n')


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
