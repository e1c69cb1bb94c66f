# SPDX-License-Identifier: Apache-2.0
"""`make demo` shows what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_site import ROOT
from tests.support.wait import wait_until

PROGRAM = (sys.executable, "-m", "tests.demo")


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "TMPDIR": str(folder), "HOME": str(folder)}


def demo(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        PROGRAM,
        env=environment(folder),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def simulated(folder: Path) -> list[str]:
    """Return processes whose folder is below `folder`."""
    found: list[str] = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd").startswith(str(folder)):
                found.append(entry)
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_the_demo_ends_with_everything_free_and_nothing_left(tmp_path: Path) -> None:
    text, error = demo(tmp_path).communicate(timeout=100)
    assert error == ""
    assert "\x1b" not in text
    for part in (
        "prolog exits 99",
        "-l gpu=1.5 is no number of GPUs",
        "runs without a shepherd",
        "8 GPUs: 8 free",
        "job 107    CUDA_VISIBLE_DEVICES=7 GPULOCK_SHARE=1/4",
    ):
        assert part in text
    assert os.listdir(tmp_path) == []
    assert simulated(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_cleans_up_when_it_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    process = demo(tmp_path)
    assert process.stdout is not None
    while "3." not in process.stdout.readline():
        pass
    process.send_signal(number)
    process.communicate(timeout=100)
    assert process.returncode == 130
    assert os.listdir(tmp_path) == []
    wait_until(lambda: not simulated(tmp_path), why="its processes to end")
