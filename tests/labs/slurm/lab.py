# SPDX-License-Identifier: Apache-2.0
"""A real Slurm on one machine: slurmctld, munged and up to four slurmds in namespaces.

    with Slurm(Setup(gres="gpulock"), nodes=2) as slurm:
        job = slurm.submit("slalice", "--gres=gpu:2", script="env | grep SLURM")
        slurm.wait_done(job)

Needs a private root. All of it lives in one scratch folder, in namespaces and in Slurm's cgroups.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NewType

from tests.labs.common.processes import end
from tests.labs.slurm import config, processes
from tests.labs.slurm.cluster import USERS, Cluster, fields
from tests.labs.slurm.processes import Step
from tests.support.wait import LabError, wait_until

JobId = NewType("JobId", int)

# A job that is COMPLETING still runs its epilogs.
STARTED: Final = ("CONFIGURING", "RUNNING")
ENDED: Final = ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


class Slurm(Cluster):
    """The lab as its tests use it; each method raises `LabError` when it could not do its work."""

    # --- jobs ---------------------------------------------------------------------------------

    def submit(
        self,
        user: str,
        *sbatch_args: str,
        script: str = "true\n",
        env: Mapping[str, str] | None = None,
    ) -> JobId:
        """Submit the lines of a bash script; what it prints is for `said`.

        Of an array the id is that of the whole (see `tasks`), of a heterogeneous job the leader's.
        """
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}"
        command = ["sbatch", "--parsable", "--output=out.%j", *sbatch_args]
        done = self.run_as(user, command, env=env, stdin=text)
        if done.returncode != 0 or not done.stdout.strip().isdigit():
            raise LabError(f"{user}: {command} failed: {done.stdout}{done.stderr}")
        return JobId(int(done.stdout))

    def srun(
        self, user: str, *args: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run srun as a user on the head machine, to its end."""
        return self.run_as(user, ["srun", *args], env=env)

    def salloc(self, user: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run salloc as a user on the head machine, to the end of the command given to it."""
        return self.run_as(user, ["salloc", *args])

    def said(self, job: JobId) -> str:
        """Return what a batch job has printed; empty as long as there is no file."""
        found = [path for user in self.users.values() for path in user.home.glob(f"out.{job}")]
        return found[0].read_text(errors="replace") if found else ""

    def scancel(self, *args: str | JobId) -> None:
        """Run scancel as root."""
        self.run_in(self.master, ["scancel", *map(str, args)])

    def begin(self, job: JobId) -> None:
        """Let a requeued job start now, and not after two minutes.

        Within the same second slurmd would mostly refuse the run ("credential revoked"), and within
        the next one the slurmd of 22.05 runs no Prolog: it counts in whole ones.
        """
        self.wait_state(job, "PENDING", *STARTED)
        try:
            self.scontrol("update", f"jobid={job}", "starttime=now+2")
        except LabError as fault:  # after a node failure a job waits for no two minutes
            if "no longer pending" not in str(fault):
                raise

    # --- what becomes of them -----------------------------------------------------------------

    def job(self, job: JobId) -> dict[str, str]:
        """Return what scontrol shows of one job; nothing once it is forgotten."""
        (lines,) = wait_until(  # no line of a job that is forgotten
            lambda: None if (now := self._shown(job)) is None else (now,), why="slurmctld's answer"
        )
        records = map(fields, lines)
        return next(
            (record for record in records if record.get("JobId") == str(job)), dict[str, str]()
        )

    def state(self, job: JobId) -> str:
        """Return a job's state, such as RUNNING; empty once it is forgotten."""
        return self.job(job).get("JobState", "")

    def tasks(self, array: JobId) -> dict[int, JobId]:
        """Return the job ids of an array's tasks, of those that have started."""
        shown = self.scontrol("show", "job", "-o", str(array))
        pairs = re.findall(r"JobId=(\d+) ArrayJobId=\d+ ArrayTaskId=(\d+) ", shown)
        return {int(task): JobId(int(job)) for job, task in pairs}

    def wait_state(self, job: JobId, *states: str) -> str:
        """Wait until a job is in one of the states; return it."""
        (state,) = wait_until(  # the state of a job that is forgotten is empty
            lambda: (now,) if (now := self.state(job)) in states else None,
            why=f"job {job} to become {' or '.join(one or 'forgotten' for one in states)}",
        )
        return state

    def wait_running(self, job: JobId) -> None:
        """Wait until a batch job or its steps run, which is past Prolog and TaskProlog."""
        wait_until(lambda: bool(self.job_processes(job)), why=f"job {job} to have a process")

    def wait_done(self, job: JobId) -> str:
        """Wait until a job and its epilogs are over; return the state it ended in."""
        return self.wait_state(job, *ENDED, "")

    def wait_settled(self, job: JobId) -> str:
        """Wait until slurmctld, steps and hooks are all done with a job; return its state."""
        state = self.wait_done(job)
        self.wait_stepless(job)
        wait_until(
            lambda: not processes.hook_of_job_runs(job), why=f"the hooks of job {job} to end"
        )
        return state

    def steps(self, job: JobId, node: str | None = None) -> list[Step]:
        """Return a job's step daemons, on one node or on all."""
        machines = [self.machines[name] for name in ([node] if node else self.nodes)]
        return [step for step in processes.steps(machines) if step.job == job]

    def wait_stepless(self, job: JobId, node: str | None = None) -> None:
        """Wait until no step daemon of a job is left: its Epilog may run while one ends."""
        wait_until(lambda: not self.steps(job, node), why=f"the step daemons of job {job} to end")

    def wait_logged(self, node: str, job: JobId, words: str) -> None:
        """Wait until a node's slurmd has written something of a job, named where `{}` is.

        As "job 7" or "job 7's", since 26.05 as "JobId=7 SLUID=s1".
        """
        log = self.lab / f"log/{node}.log"
        wanted = re.compile(words.format(rf"(?:job |JobId=){job}\b\S*(?: SLUID=\S+)?"))
        wait_until(
            lambda: wanted.search(log.read_text(errors="replace")) is not None,
            why=f"slurmd on {node} to say: {words.format(job)}",
        )

    def job_processes(self, job: JobId, node: str | None = None) -> list[int]:
        """Return a job's own processes, on one node or on all."""
        machines = [self.machines[name] for name in ([node] if node else self.nodes)]
        return processes.job_processes(machines, job)

    def clear_jobs(self) -> None:
        """Cancel all jobs and wait until their epilogs are over."""
        for user in USERS:  # of several --user scancel obeys the last
            self.scancel(f"--user={user}")
        wait_until(lambda: self.queue("-h", "--all") == "", why="all jobs to be gone")

    def recover(self) -> None:
        """Repair what a test has left: daemons run, no job is there, every node is idle."""
        for place in (self.lab / "stops").glob("*"):  # a hook that a test has stopped goes on
            if place.suffix in (".before", ".after", ".instead"):
                place.unlink(missing_ok=True)
        if not self.slurmctld_pid():
            self.start_slurmctld()
        for node in self.nodes:
            if not self.slurmd_pid(node):
                self.start_slurmd(node)
        self.clear_jobs()
        # What bash forks between SIGCONT and SIGTERM of its job outlives it under linuxproc.
        end(processes.job_processes(self.machines.values()))
        if self.unheard:
            self.restart_slurmds()
        for node in self.nodes:
            if self.is_out(node):
                self.hear_out(node)
                self.resume_node(node)

    def device(self, node: str, minor: int) -> Path:
        """Return the device file of gres.conf; opening it says ENXIO, or EPERM if denied."""
        return config.device(self.lab, node, minor)

    # --- inner --------------------------------------------------------------------------------

    def _shown(self, job: JobId) -> list[str] | None:
        """Return what scontrol prints of a job, None where slurmctld is too busy to answer."""
        done = self.run_in(self.master, ["scontrol", "show", "job", "-o", "-d", str(job)])
        known = done.returncode == 0 or "Invalid job id" in done.stdout + done.stderr
        return done.stdout.splitlines() if known else None
