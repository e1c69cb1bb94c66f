# SPDX-License-Identifier: Apache-2.0
"""A node of a real Slurm, for the scenarios of both schedulers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import ClassVar, Final

from gpulock.install.hooks import HookPaths
from tests.labs.both.site import Site
from tests.labs.common.confined_node import ConfinedNode
from tests.labs.slurm import jobs, modes
from tests.labs.slurm.config import CPUS
from tests.labs.slurm.confined import confined_site
from tests.labs.slurm.gpulock import Gpulock, hook_programs
from tests.labs.slurm.hooks import Stops, leak, stops
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import EXTRA, MORE, NODE, by_gpulock, by_slurm, write_map
from tests.support.wait import LabError, wait_until

LATER: Final = "BeginTime"  # why a job waits that was sent back


class SlurmSite(Site):
    """A compute node; by either selection of devices, whose Slurm stays as it is for all tests."""

    node = NODE
    count = 4
    alice, bob = "slalice", "slbob"

    runs: ClassVar[str] = "step daemon"
    left: ClassVar[str] = "process "
    released: ClassVar[str] = "released by its epilog"
    settled: ClassVar[str] = "released by its job, whose processes are gone"
    leaked: ClassVar[str] = "slurmctld says CANCELLED"

    def __init__(self, gpus: Gpulock, *, is_selected_by_slurm: bool = False) -> None:
        self.gpus: Gpulock = gpus
        self.slurm = gpus.slurm
        self.hooks: Stops = stops(gpus)
        self.is_selected_by_slurm = is_selected_by_slurm

    def prepare(self) -> None:
        if self.is_selected_by_slurm:
            by_slurm(self.gpus, hooks=self.hooks.hooks, extra=EXTRA)
        else:
            by_gpulock(self.gpus, hooks=self.hooks.hooks, extra=EXTRA, order=MORE)

    # --- jobs -----------------------------------------------------------------------------------

    def submit(self, gpus: int, script: str, *, user: str = "", tasks: int = 0) -> int:
        asked = [f"--gres=gpu:{gpus}"] if gpus else []
        many = [f"--array=1-{tasks}"] if tasks else []
        words = ("-w", NODE, "--requeue", *asked, *many)
        return self.slurm.submit(user or self.alice, *words, script=script)

    def wait_running(self, job: int) -> None:
        self.slurm.wait_running(JobId(job))
        wait_until(lambda: len(self.slurm.steps(JobId(job), NODE)) >= 2, why="its two steps")

    def wait_launched(self, job: int) -> None:
        # The end of a Prolog may be seen no sooner than that of a job which begins at the same
        # time (docs/facts/slurm.md, "Output of a hook").
        log = self.slurm.lab / f"log/{NODE}.log"
        launched = re.compile(rf"Launching batch (job |JobId=){job} ")  # 26.05 has the second
        wait_until(
            lambda: launched.search(log.read_text(errors="replace")),
            why=f"the Prolog of job {job} to be over",
        )

    def wait_over(self, job: int) -> None:
        self.slurm.wait_settled(JobId(job))

    def is_empty(self) -> bool:
        return self.slurm.queue("-h", "--all") == ""

    def wait_empty(self) -> None:
        begun: set[tuple[str, ...]] = set()  # each run of a job once

        def over() -> bool:
            """Start what was sent back, and would wait two minutes; return whether all are over."""
            shown = self.slurm.queue("-h", "-t", "PD", "-O", "JobID,RestartCnt,Reason") or ""
            lines = (line.split(None, 2) for line in shown.splitlines())
            for job, run in [(job, run) for job, run, why in lines if why.strip() == LATER]:
                if (job, run) not in begun:
                    begun.add((job, run))
                    with contextlib.suppress(LabError):  # it has started meanwhile
                        self.slurm.scontrol("update", f"jobid={job}", "starttime=now+2")
            return self.is_empty()

        wait_until(over, why="the queue to be empty")

    def cancel(self, job: int) -> None:
        self.slurm.scancel(JobId(job))

    def tasks(self, job: int) -> list[int]:
        tasks = self.slurm.tasks(JobId(job)).items()
        return [task for task, number in sorted(tasks) if self.slurm.job_processes(number)]

    def held_by_task(self, job: int, task: int) -> list[str]:
        return self.held(self.slurm.tasks(JobId(job))[task])

    def said(self, job: int) -> str:
        return self.slurm.said(JobId(job))

    def processes(self, job: int) -> list[int]:
        return self.slurm.job_processes(JobId(job), NODE)

    def kill_supervisors(self, job: int) -> None:
        jobs.kill_steps(self.gpus, JobId(job), NODE)

    def conclude(self, job: int) -> None:
        self.cancel(job)  # its Epilog runs
        self.wait_over(job)

    def leak(self, job: int) -> None:
        leak(self.hooks, NODE, JobId(job))

    # --- refusals -------------------------------------------------------------------------------

    def wait_sent_back(self, job: int) -> str:
        jobs.wait_requeued(self.gpus, JobId(job))
        return self.said(job)

    def begin(self, job: int) -> None:
        self.slurm.begin(JobId(job))

    def begin_held(self, job: int) -> None:
        held = "launch_failed_requeued_held"
        wait_until(lambda: held in self.slurm.job(JobId(job))["Reason"], why="the job to be held")
        self.slurm.scontrol("release", str(job))
        self.begin(job)

    def believing(self) -> contextlib.AbstractContextManager[None]:
        return jobs.impatient(self.gpus, NODE)  # the Slurm of a test believes so all the time

    def drained(self, refused: int) -> contextlib.AbstractContextManager[None]:
        del refused  # it waits until `begin`
        return contextlib.nullcontext()

    def wait_stopped(self, job: int) -> str:
        why = self.slurm.wait_node(NODE, "DRAIN")
        jobs.wait_requeued(self.gpus, JobId(job))
        return why

    def in_service(self) -> bool:
        return not self.slurm.is_out(NODE)

    def put_in_service(self) -> None:
        self.slurm.hear_out(NODE)
        self.slurm.resume_node(NODE)

    # --- daemons --------------------------------------------------------------------------------

    def stop_daemon(self) -> None:
        self.slurm.stop_slurmd(NODE, kill=True)

    def start_daemon(self) -> None:
        self.slurm.start_slurmd(NODE)

    @contextlib.contextmanager
    def controller_away(self) -> Generator[None]:
        self.slurm.stop_slurmctld()
        try:
            yield
        finally:
            if self.slurm.slurmd_pid(NODE):
                self.slurm.bring_back_slurmctld()
            else:
                self.slurm.start_slurmctld()

    def come_back(self, job: int) -> None:
        self.slurm.scontrol("update", f"nodename={NODE}", "state=down", "reason=reboot")
        self.cancel(job)  # else it starts by itself, as soon as its node is back
        self.slurm.wait_done(JobId(job))
        self.slurm.start_slurmd(NODE, wipe=True)
        wait_until(self.in_service, why="the node to be back")

    # --- gpulock --------------------------------------------------------------------------------

    def configure(self, **changes: str) -> None:
        selection = "slurm" if self.is_selected_by_slurm else "gpulock"
        keys = {"SLURM_DEVICE_SELECTION": selection, **changes}
        self.gpus.configure(NODE, **modes.settings(self.gpus, **keys))

    @contextlib.contextmanager
    def confined(self) -> Generator[ConfinedNode]:
        with confined_site(self.gpus) as node:
            yield node

    @contextlib.contextmanager
    def with_hooks_below(self, prefix: Path, jobs: int) -> Generator[None]:
        hooks = hook_programs(HookPaths(prefix / "current"))
        mode = by_slurm if self.is_selected_by_slurm else by_gpulock
        mode(self.gpus, hooks=hooks, cpus=max(CPUS, jobs))
        if not self.is_selected_by_slurm:
            write_map(self.gpus, NODE, ())  # as `install slurm` does: by it gpulock is known
        yield
