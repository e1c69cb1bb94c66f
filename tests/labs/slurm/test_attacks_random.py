# SPDX-License-Identifier: Apache-2.0
"""Random hostile jobs beside honest ones: these all run, the node stays, nothing is left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.labs.both.fair import Fair
from tests.labs.both.slurm_site import SlurmSite
from tests.labs.common.hostile_jobs import environ_bytes, hostile_job
from tests.labs.common.installed import SOAK
from tests.labs.slurm.confined import COUNT, confined_site
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import notes
from tests.labs.slurm.modes import NODE, SLURM_CONF, Mode, by_gpulock, by_slurm
from tests.support.wait import LabError, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
HOSTILE, HONEST = "slalice", "slbob"
JOBS: Final = 400 if SOAK else 12  # of each user, at least, in each of three settings
SLURMS: Final[Mapping[str, str]] = {
    "requeues itself": "scontrol requeue $SLURM_JOB_ID; sleep 2",
    "cancels itself": "scancel $SLURM_JOB_ID; sleep 2",
    "cancels its steps": "srun sleep 2 & scancel -s KILL $SLURM_JOB_ID.0; sleep 2",
    "changes itself": "scontrol update jobid=$SLURM_JOB_ID comment=gres:gpu:4 name=root nice=99",
    "steps without end": "for i in {{1..8}}; do srun --overlap --gres=none true & done; wait",
    "ends its task prolog": "srun --task-prolog=/bin/false --task-epilog=/bin/false true",
    "copies to devices": "for d in {devices}; do timeout 1 sbcast --force /bin/ls $d; done",
}
# An ended job's lock is also kept by other processes of its own user that have the device open, of
# a job without GPUs as well. Such a job is over within that time, and a Prolog waits for longer,
# also where a look takes a second.
SETTINGS: Final = {"SLURM_WAIT": "90", "LEFTOVER_PROCESSES": "kill"}
SETUP: Final = {"extra": {**SLURM_CONF, "KillWait": "1"}, "proctrack": "cgroup"}


class SlurmFair(Fair):
    """A compute node."""

    jobs = JOBS
    longest = 35

    def __init__(self, gpus: Gpulock, devices: Sequence[Path]) -> None:
        super().__init__(SlurmSite(gpus), devices)
        self.gpus = gpus
        self.slurm = gpus.slurm

    def queue(self) -> list[tuple[str, int]]:
        said = self.slurm.queue("-h", "-o", "%u %i %r") or ""
        lines = (line.split(" ", 2) for line in said.splitlines())
        waits = ("BeginTime", "JobHeldUser")
        return [(user, int(job)) for user, job, why in lines if why not in waits or user == HONEST]

    def submit_hostile(self) -> None:
        """Submit a job of the zoo; one that kills all of its user's processes may kill sbatch."""
        one = hostile_job(self.rng, self.devices, "/run/gpulock", SLURMS)
        brought = self.slurm.users[HOSTILE].home / f"export{len(self.tried)}"
        brought.write_bytes(environ_bytes(one.env))
        words = ["-w", NODE, "--output=/dev/null", *([f"--gres=gpu:{one.gpus}"] * bool(one.gpus))]
        words += [f"--export-file={brought}"] * bool(one.env)
        with contextlib.suppress(LabError):
            job = self.slurm.submit(HOSTILE, *words, script=one.script)
            self.tried[job] = (one.name, self.looks + self.longest)

    def expect_all_ran(self) -> None:
        """Expect that all honest jobs ran, and that nothing is left of any job."""
        super().expect_all_ran()
        self.slurm.clear_jobs()
        self.expect_nothing()
        wait_until(lambda: notes(self.gpus, NODE) == [], why="no note to be left")


@pytest.mark.parametrize("mode", [by_gpulock, by_slurm])
def test_honest_jobs_all_run_beside_hostile_ones(slurm_gpus: Gpulock, mode: Mode) -> None:
    """Tried: the zoo of tests/labs/common/hostile_jobs.py, at random. The seed is printed.

    Stopped by: a lock is held by its owner's processes alone, and Slurm ends a job's processes.
    """
    mode(slurm_gpus, SETTINGS, **SETUP)
    devices = [slurm_gpus.device(NODE, minor) for minor in range(COUNT)]
    fair = SlurmFair(slurm_gpus, devices)
    fair.run()
    fair.expect_all_ran()


def test_honest_jobs_all_run_beside_hostile_ones_where_jobs_are_confined(
    slurm_gpus: Gpulock,
) -> None:
    """Tried: the same with ISOLATION=cgroup. Stopped by: as above, and by the job's own cgroup."""
    with confined_site(slurm_gpus, proctrack="cgroup") as site:
        site.configure(**SETTINGS)
        devices = [site.dev / f"nvidia{n}" for n in range(COUNT)]
        fair = SlurmFair(site.gpus, devices)
        fair.run()
        fair.expect_all_ran()
        wait_until(lambda: site.left() == [], why="no cgroup of a job to be left")
