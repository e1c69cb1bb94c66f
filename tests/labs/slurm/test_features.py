# SPDX-License-Identifier: Apache-2.0
"""Lines of a site's slurm.conf that change how hooks are named and timed, or who starts steps.

A release that has not one yet runs the same jobs without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import SHOW_MASK
from tests.labs.slurm.modes import NODE, SLURM_CONF, by_gpulock
from tests.labs.slurm.releases import (
    HAS_HOOK_TIMEOUTS,
    HAS_STEPMGR,
    NAMES_HOOKS_BY_FOLDER,
)

pytestmark = pytest.mark.lab
SHOW_STEP = f"{SHOW_MASK}srun --gres=gpu:1 bash -c 'echo step=$CUDA_VISIBLE_DEVICES'\n"


def check_one_job(gpus: Gpulock, *words: str) -> None:
    """Run a job of 2 GPUs with a step of 1, whose GPUs are free then."""
    slurm = gpus.slurm
    job = slurm.submit("slalice", "-w", NODE, "--gres=gpu:2", *words, script=SHOW_STEP)
    assert slurm.wait_done(job) == "COMPLETED", slurm.said(job)
    gpus.wait_free()
    assert (gpus.locks(NODE), slurm.node_words(NODE)) == ({}, {"IDLE"})
    assert slurm.said(job) == "mask=0,1.\nstep=0\n"


@pytest.mark.short
def test_a_job_whose_own_node_manages_its_steps_gets_its_gpus(slurm_gpus: Gpulock) -> None:
    """The extern step daemon of such a job has another title (stepmgr, 24.05)."""
    newer = slurm_gpus.slurm.release >= HAS_STEPMGR
    extra = {"SlurmctldParameters": "enable_stepmgr"} if newer else {}
    by_gpulock(slurm_gpus, extra={**SLURM_CONF, **extra})

    check_one_job(slurm_gpus, *(["--stepmgr"] if newer else []))


def test_hooks_with_time_limits_of_their_own_are_fit_for_use(slurm_gpus: Gpulock) -> None:
    newer = slurm_gpus.slurm.release >= HAS_HOOK_TIMEOUTS
    keys = ("PrologTimeout", "EpilogTimeout") if newer else ("PrologEpilogTimeout",)
    by_gpulock(slurm_gpus, extra={**SLURM_CONF, **dict.fromkeys(keys, "120")})

    check_one_job(slurm_gpus)
    assert not [line for line in doctor_faults(slurm_gpus) if "Timeout" in line]


@pytest.mark.short
def test_hooks_that_are_named_by_the_folder_of_slurm_conf_run(slurm_gpus: Gpulock) -> None:
    """As a site without slurm.conf on its nodes names them; an older slurmd wants whole paths."""
    folder = slurm_gpus.slurm.lab / "etc"
    newer = slurm_gpus.slurm.release >= NAMES_HOOKS_BY_FOLDER
    named: dict[str, str | Path] = {}
    for key, program in slurm_gpus.setup.hooks.items():
        link = folder / f"{key.lower()}.site"
        link.unlink(missing_ok=True)
        link.symlink_to(program)
        whole = not newer or key == "TaskProlog"
        named[key] = link if whole else link.name
    by_gpulock(slurm_gpus, hooks=named)

    check_one_job(slurm_gpus)


def doctor_faults(gpus: Gpulock) -> list[str]:
    """Return the lines of doctor on the node that say a fault."""
    shown = gpus.command(NODE, "doctor").stdout
    return [line for line in shown.splitlines() if line.lstrip().startswith("✗")]
