# SPDX-License-Identifier: Apache-2.0
"""Ordinary jobs of a real Grid Engine get GPUs that nobody else has."""

from __future__ import annotations

import pytest

from tests.labs.common.installed import variables
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import on, said, start_shepherds

pytestmark = pytest.mark.lab
NODE = NODES[0]
ON_NODE = ("-l", f"h={NODE}", "-q", "gpu.q")
SHOW = "env | grep -E '^(CUDA|NVIDIA|GPU|SGE_GPU|APPTAINERENV|SINGULARITYENV)' | sort\n"


def run(gpus: Gpulock, *args: str, script: str = SHOW) -> dict[str, str]:
    """Run a job to its end; return the variables it saw."""
    job = gpus.sge.submit("glalice", "-j", "y", *ON_NODE, *args, stdin=script)
    gpus.sge.wait_done(job)
    return variables(said(gpus, job))


def test_per_slot_requests_count_once_a_slot_and_per_job_requests_once(gpus: Gpulock) -> None:
    per_slot = run(gpus, "-pe", "smp", "3", "-l", "gpu=2")
    per_job = run(gpus, "-pe", "smp", "3", "-l", "gpuj=2")
    assert len(per_slot["CUDA_VISIBLE_DEVICES"].split(",")) == 6
    assert len(per_job["CUDA_VISIBLE_DEVICES"].split(",")) == 2


@pytest.mark.parametrize(
    "options",
    [
        "-M a@b,c@d -m a -ac a=b -p -5 -js 3 -R y -r y -notify -v A=b -S /bin/sh -i /dev/null -b y",
        "-soft -l h_rt=600 -q gpu.q -hard -binding linear:1 -hold_jid 1 -a 202601010000 -w n -b y",
        "-pe smp 1-2 -masterq gpu.q -A account -wd /tmp -b y -N named",
    ],
)
def test_a_job_of_any_options_is_read_to_its_end(gpus: Gpulock, options: str) -> None:
    """Each fills fields of execd's job file that are empty else."""
    job = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), *options.split(), "sleep", "600")
    gpus.sge.wait_running(job)
    assert len(gpus.locks(NODE)) in (1, 2)


def test_qrsh_with_a_command_gets_its_gpus(gpus: Gpulock) -> None:
    """With shepherd_cmd: Open Cluster Scheduler fails on any prolog of such a job without it."""
    start_shepherds(gpus.sge, str(gpus.hooks.folder / "prolog/sge_shepherd"))
    try:
        script = "env; test -t 0 || echo TERMINAL=none; exit 7"
        words = ("-pty", "no", *ON_NODE, "-l", "gpu=2", f"sh -c '{script}'")
        done = gpus.sge.qrsh("glalice", *words)
        seen = variables(done.stdout)
        assert (seen["CUDA_VISIBLE_DEVICES"], seen["TERMINAL"]) == ("0,1", "none")
        assert done.returncode == 7
        assert gpus.sge.queue_states()[NODE] == ""
    finally:
        start_shepherds(gpus.sge, "none")
    gpus.wait_free()
