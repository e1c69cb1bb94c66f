# SPDX-License-Identifier: Apache-2.0
"""The TaskProlog as slurmstepd starts it: its standard output may be closed or full."""

from __future__ import annotations

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
