# SPDX-License-Identifier: Apache-2.0
"""The TaskProlog as slurmstepd starts it: its standard output may be closed or full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slurm_site import ROOT, RUN, Site

HERE = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
from gpulock.slurm.task import main
os._exit(main(os.environ, sys.argv[2]))
"""


def start(site: Site, redirect: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the TaskProlog of a job of ours below a shell that opens its files."""
    command = [sys.executable, "-IS", "-c", PROGRAM, str(HERE), site.config()]
    given = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "12", **environ}
    shell = ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", *command]
    return subprocess.run(shell, env=given, capture_output=True, text=True, check=False)


def prolog(site: Site, gpus: str | None) -> None:
    assert site.prolog(12, gpus, SLURM_JOB_UID=str(ROOT)) == RUN


def test_the_lines_go_to_slurmstepd(site: Site) -> None:
    prolog(site, "1")
    done = start(site, CUDA_VISIBLE_DEVICES="1")
    assert (done.returncode, done.stderr) == (RUN, "")
    assert "export CUDA_VISIBLE_DEVICES=1\n" in done.stdout


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", ">&- 2>&- <&-"])
@pytest.mark.parametrize("gpus", ["1", None])
def test_a_task_that_cannot_be_told_does_not_start(
    site: Site, redirect: str, gpus: str | None
) -> None:
    prolog(site, gpus)
    assert start(site, redirect, CUDA_VISIBLE_DEVICES="1").returncode != 0


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full"])
def test_a_task_that_is_stopped_is_so_although_nobody_reads_why(site: Site, redirect: str) -> None:
    assert start(site, redirect, SLURM_GPUS_ON_NODE="1").returncode == 213


def test_bytes_that_are_no_text_are_no_lines(site: Site) -> None:
    prolog(site, "1")
    given = {b"SLURMD_NODENAME": b"n1", b"SLURM_JOB_ID": b"12", b"CUDA_VISIBLE_DEVICES": b"\xff\n1"}
    command = [sys.executable, "-IS", "-c", PROGRAM, str(HERE), site.config()]
    done = subprocess.run(command, env=given, capture_output=True, check=False)
    assert (done.returncode, done.stdout.count(b"\n")) == (213, 1)
    assert os.fsencode("print gpulock: job 12: unknown: ") in done.stdout
