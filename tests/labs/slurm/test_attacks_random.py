# SPDX-License-Identifier: Apache-2.0
"""Random hostile jobs beside honest ones: these all run, the node stays, nothing is left behind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.labs.common.hostile_jobs import (
    Hostile,
    complaints,
    environ_bytes,
    honest_script,
    hostile_job,
    parse_journal,
)
from tests.labs.common.installed import reap
from tests.labs.slurm.confined import COUNT, confined_site
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import SOAK, notes
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, SLURM_CONF, Mode, by_gpulock, by_slurm
from tests.support.seeds import chosen_seed
from tests.support.wait import LabError, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
HOSTILE, HONEST = "slalice", "slbob"
JOBS: Final = 400 if SOAK else 12  # of each user, at least, in each of three settings
# Ages and periods are numbers of looks at the queue, each a tenth of a second on an idle machine.
LONGEST: Final = 35  # of a hostile job, then it is cancelled
KEPT: Final = 250  # until nothing of a job that is over holds a GPU
REAP_EVERY: Final = 15
AT_ONCE: Final = {HOSTILE: 6, HONEST: 3}
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
# a job without GPUs as well. Such a job is over within LONGEST here, and a Prolog waits for longer,
# also where a look takes a second.
SETTINGS: Final = {"SLURM_WAIT": "90", "LEFTOVER_PROCESSES": "kill"}
SETUP: Final = {"extra": {**SLURM_CONF, "KillWait": "1"}, "proctrack": "cgroup"}


class Fair:
    """One node, a hostile and an honest user, and what each has submitted."""

    def __init__(self, gpus: Gpulock, devices: list[Path], rng: random.Random) -> None:
        self.gpus = gpus
        self.slurm = gpus.slurm
        self.devices = devices
        self.rng = rng
        self.asked: dict[int, int] = {}
        self.tried: dict[JobId, tuple[Hostile, int]] = {}
        self.living: dict[str, int] = {}  # job -> when it was last in the queue
        self.looks = 0
        self.late: set[str] = set()
        self.journal = self.slurm.users[HONEST].home / "journal"
        self.journal.unlink(missing_ok=True)

    def run(self) -> None:
        """Let both submit jobs, then wait until the honest ones have run."""
        wait_until(self.has_submitted_enough, why=lambda: f"enough jobs\n{self.describe()}")
        wait_until(self.is_quiet, why=lambda: f"every honest job to be over\n{self.describe()}")

    def has_submitted_enough(self) -> bool:
        """Let both submit; return whether each has submitted enough jobs."""
        waiting = self.look()
        self.cancel_old()
        if len(waiting[HONEST]) < AT_ONCE[HONEST]:
            self.submit_honest()
        if len(waiting[HOSTILE]) < AT_ONCE[HOSTILE]:
            self.submit_hostile()
        return min(len(self.asked), len(self.tried)) >= JOBS

    def look(self) -> dict[str, list[JobId]]:
        """Return the jobs of each user that are to run, or run; reap, and note late locks."""
        self.looks = now = self.looks + 1
        found: dict[str, list[JobId]] = {HOSTILE: [], HONEST: []}
        said = self.slurm.queue("-h", "-o", "%u %i %r") or ""
        for user, job, reason in (line.split(" ", 2) for line in said.splitlines()):
            self.living[job] = now
            if reason not in ("BeginTime", "JobHeldUser") or user == HONEST:
                found[user].append(JobId(int(job)))
        if now % REAP_EVERY == 0:
            reap(self.gpus, NODE)
        for device, record in self.gpus.locks(NODE).items():
            if now - self.living.setdefault(record.job_id, now) > KEPT:
                what = self.tried.get(JobId(int(record.job_id)))
                name = what[0].name if what else "an honest one"
                self.late.add(f"{device} is held by job {record.job_id}, {name}")
        return found

    def submit_honest(self) -> None:
        """Submit a job that says which devices it has."""
        number, gpus = len(self.asked), self.rng.randint(1, COUNT)
        self.asked[number] = gpus
        text = honest_script(number, self.journal)
        self.slurm.submit(HONEST, "-w", NODE, f"--gres=gpu:{gpus}", script=text)

    def submit_hostile(self) -> None:
        """Submit a job of the zoo; one that kills all of its user's processes may kill sbatch."""
        one = hostile_job(self.rng, self.devices, "/run/gpulock", SLURMS)
        brought = self.slurm.users[HOSTILE].home / f"export{len(self.tried)}"
        brought.write_bytes(environ_bytes(one.env))
        words = ["-w", NODE, "--output=/dev/null", *([f"--gres=gpu:{one.gpus}"] * bool(one.gpus))]
        words += [f"--export-file={brought}"] * bool(one.env)
        with contextlib.suppress(LabError):
            job = self.slurm.submit(HOSTILE, *words, script=one.script)
            self.tried[job] = (one, self.looks)

    def cancel_old(self) -> None:
        """End hostile jobs that do not end by themselves."""
        old = [job for job, (_, begun) in self.tried.items() if 0 < begun < self.looks - LONGEST]
        if old:
            self.slurm.scancel(*old)
        for job in old:
            self.tried[job] = (self.tried[job][0], 0)

    def is_quiet(self) -> bool:
        """Return whether no honest job is left."""
        self.cancel_old()
        return not self.look()[HONEST]

    def is_free(self) -> bool:
        """Reap; return whether nothing holds a GPU."""
        reap(self.gpus, NODE)
        return not self.gpus.locks(NODE)

    def describe(self) -> str:
        """Return the queue, the node and what was tried last."""
        last = [f"{job} {one.name} {one.gpus}" for job, (one, _) in list(self.tried.items())[-20:]]
        queue = self.slurm.queue("--all") or ""
        said = [path.read_text() for path in self.slurm.users[HONEST].home.glob("out.*")]
        node = str(self.slurm.node_state(NODE))
        return "\n".join([queue, node, *filter(None, said), *last, self.slurm.logs()])

    def judge(self) -> None:
        """Expect that all honest jobs ran, and that nothing is left of any job."""
        assert complaints(self.asked, parse_journal(self.journal.read_text())) == [], (
            self.describe()
        )
        assert not self.slurm.is_out(NODE), self.describe()
        assert self.late == set(), f"{self.late}\n{self.describe()}"
        self.slurm.clear_jobs()
        # an Epilog beside other jobs of its user, which fork all the time, leaves it to gpulockd
        wait_until(self.is_free, why=lambda: f"all locks to be gone\n{self.describe()}")
        wait_until(lambda: notes(self.gpus, NODE) == [], why="no note to be left")
        runs = self.slurm.path_in(NODE, "/var/lib/gpulock/runs")
        assert not runs.is_dir() or list(runs.iterdir()) == []
        print(f"{len(self.asked)} honest jobs, {len(self.tried)} hostile ones")


@pytest.mark.parametrize("mode", [by_gpulock, by_slurm])
def test_honest_jobs_all_run_beside_hostile_ones(slurm_gpus: Gpulock, mode: Mode) -> None:
    """Tried: the zoo of tests/labs/common/hostile_jobs.py, at random. The seed is printed.

    Stopped by: a lock is held by its owner's processes alone, and Slurm ends a job's processes.
    """
    seed = chosen_seed("GPULOCK_SEED")
    print(f"GPULOCK_SEED={seed}")
    mode(slurm_gpus, SETTINGS, **SETUP)
    devices = [slurm_gpus.device(NODE, minor) for minor in range(COUNT)]
    fair = Fair(slurm_gpus, devices, random.Random(seed))
    fair.run()
    fair.judge()


def test_honest_jobs_all_run_beside_hostile_ones_where_jobs_are_confined(
    slurm_gpus: Gpulock,
) -> None:
    """Tried: the same with ISOLATION=cgroup. Stopped by: as above, and by the job's own cgroup."""
    seed = chosen_seed("GPULOCK_SEED")
    print(f"GPULOCK_SEED={seed}")
    with confined_site(slurm_gpus, proctrack="cgroup") as site:
        site.configure(**SETTINGS)
        devices = [site.dev / f"nvidia{n}" for n in range(COUNT)]
        fair = Fair(site.gpus, devices, random.Random(seed))
        fair.run()
        fair.judge()
        wait_until(lambda: site.left() == [], why="no cgroup of a job to be left")
