# SPDX-License-Identifier: Apache-2.0
"""A node of a real Grid Engine, for the scenarios of both schedulers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import ClassVar, Final

from gpulock.sge.card_map import format_card_map
from tests.labs.both.site import Site
from tests.labs.common.confined_node import ConfinedNode
from tests.labs.sge import jobs
from tests.labs.sge.cluster import NODES
from tests.labs.sge.config import gid_range
from tests.labs.sge.confined import isolated
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.lab import JobId
from tests.support.wait import LabError, wait_ended

# What starts a hook is of each release's own folder; the queue's line here is of neither.
BELOW: Final = (
    "root@/usr/bin/env -i PATH=/usr/bin:/bin JOB_ID=$job_id SGE_TASK_ID=$ja_task_id QUEUE=$queue"
    " {}/current/{}/sge"
)


SHARES: Final = "gpu_share"


class SgeSite(Site):
    """An execution host."""

    node = NODES[0]
    count = GPUS
    alice, bob = "glalice", "glbob"

    runs: ClassVar[str] = "its shepherd"
    left: ClassVar[str] = "runs without a shepherd"
    released: ClassVar[str] = "runs without a shepherd"
    settled: ClassVar[str] = "its shepherd is gone, no process carries its group"
    leaked: ClassVar[str] = settled
    names_itself: ClassVar[str] = (
        "SLURM_JOB_ID=$((JOB_ID * 1000 + SGE_TASK_ID)) SLURMD_NODENAME=$HOSTNAME\n"
    )

    def __init__(self, gpus: Gpulock) -> None:
        self.gpus: Gpulock = gpus
        self.sge = gpus.sge
        self._groups: dict[int, int] = {}

    # --- jobs -----------------------------------------------------------------------------------

    def submit(
        self, gpus: int, script: str, *, user: str = "", tasks: int = 0, kind: str = "gpu"
    ) -> int:
        """Submit a job; `gpu_share` is the other kind, places on a card."""
        asked = ["-l", f"{kind}={gpus}"] if gpus else []
        many = ["-t", f"1-{tasks}"] if tasks else []
        words = jobs.on(self.node, *asked, *many)
        return self.sge.submit(user or self.alice, *words, stdin=f"#!/bin/bash\n{script}")

    def wait_running(self, job: int) -> None:
        self.sge.wait_running(JobId(job))
        with contextlib.suppress(LabError, OSError):  # it is over already
            group = self.sge.spool_dir(JobId(job)) / "addgrpid"
            self._groups[job] = int(group.read_text())  # also when no lock tells it any more

    def wait_over(self, job: int) -> None:
        self.sge.wait_settled(JobId(job))

    def is_empty(self) -> bool:
        return not self.sge.qstat("-u", "*").strip()

    def cancel(self, job: int) -> None:
        self.sge.qdel(str(job))

    def tasks(self, job: int) -> list[int]:
        return [task for task in (1, 2) if self.sge.runs(JobId(job), task)]

    def held_by_task(self, job: int, task: int) -> list[str]:
        owners = self.gpus.locks(self.node).items()
        mine = (str(job), str(task))
        return [name for name, one in owners if (one.job_id, one.task_id) == mine]

    def said(self, job: int) -> str:
        users = (self.alice, self.bob)
        return "".join(jobs.said(self.gpus, JobId(job), user=user) for user in users)

    def processes(self, job: int) -> list[int]:
        return jobs.carriers(self._groups[job])

    def kill_supervisors(self, job: int) -> None:
        shepherd = self.sge.shepherd_pid(JobId(job))
        os.kill(shepherd, 9)
        wait_ended([shepherd], why="the shepherd to be gone")

    def conclude(self, job: int) -> None:
        self.sge.wait_done(JobId(job))  # execd has seen the shepherd's end

    def leak(self, job: int) -> None:
        self.kill(job)

    # --- refusals -------------------------------------------------------------------------------

    def wait_sent_back(self, job: int) -> str:
        self.sge.wait_state(JobId(job), "Rq")
        return self.said(job)

    def begin(self, job: int) -> None:
        del job  # it starts by itself

    def begin_held(self, job: int) -> None:
        del job  # the queue's error was all

    @contextlib.contextmanager
    def believing(self) -> Generator[None]:
        self.sge.set_exechost(self.node, "gpu=99,gpuj=99,slots=99")
        try:
            yield
        finally:
            self.sge.set_exechost(self.node, f"gpu={GPUS},gpuj={GPUS},slots=16")

    @contextlib.contextmanager
    def drained(self, refused: int) -> Generator[None]:
        self.sge.qmod("-d", f"gpu.q@{self.node}")  # or qmaster tries it again and again
        try:
            self.sge.wait_state(JobId(refused), "Rq")
            yield
        finally:
            self.sge.qmod("-e", f"gpu.q@{self.node}")

    def wait_stopped(self, job: int) -> str:
        jobs.wait_refused(self.gpus, self.node, JobId(job))
        return self.said(job)

    def in_service(self) -> bool:
        return self.sge.queue_states()[self.node] == ""

    def put_in_service(self) -> None:
        self.sge.clear_queue_errors()

    # --- daemons --------------------------------------------------------------------------------

    def stop_daemon(self) -> None:
        self.sge.stop_execd(self.node, kill=True)

    def start_daemon(self) -> None:
        self.sge.start_execd(self.node)

    @contextlib.contextmanager
    def controller_away(self) -> Generator[None]:
        self.sge.stop_qmaster(kill=True)
        try:
            yield
        finally:
            self.sge.start_qmaster()

    def come_back(self, job: int) -> None:
        self.start_daemon()
        self.sge.qdel("-f", str(job))

    # --- gpulock --------------------------------------------------------------------------------

    def configure(self, **changes: str) -> None:
        self.gpus.configure(self.node, **changes)

    @contextlib.contextmanager
    def shared(self, cards: Sequence[int]) -> Generator[None]:
        plain = f"gpu={GPUS},gpuj={GPUS},slots=16"
        self.sge.set_complex("gpu_share gpu_share INT <= YES YES 0 0")
        self.sge.set_exechost(self.node, f"{plain},gpu_share={4 * len(cards)}")
        self.configure(**_share_keys(cards))
        try:
            yield
            self.sge.clear_jobs()
        finally:
            self.sge.set_exechost(self.node, plain)

    @contextlib.contextmanager
    def confined(self, cards: Sequence[int] = ()) -> Generator[ConfinedNode]:
        with contextlib.ExitStack() as stack:
            if cards:
                stack.enter_context(self.shared(cards))
                jobs.restart_execd(self.gpus, self.node, execd_params="ENABLE_ADDGRP_KILL=false")
                stack.callback(jobs.forget_conf, self.gpus, self.node, "execd_params")
            node = stack.enter_context(isolated(self.gpus))
            node.configure(**(_share_keys(cards) if cards else {}))
            yield node

    @contextlib.contextmanager
    def with_hooks_below(self, prefix: Path, jobs: int) -> Generator[None]:
        sge, queue = self.sge, f"gpu.q@{self.node}"
        sge.qconf("-rattr", "queue", "slots", str(jobs), queue)
        sge.set_exechost(self.node, f"gpu={GPUS},gpuj={GPUS},slots={jobs}")
        sge.set_conf("gid_range", gid_range(sge.lab, 5, 500), host=self.node)
        installed = format_card_map(self.node, {})
        sge.path_in(self.node, "/var/lib/gpulock/sge-map").write_text(installed)
        sge.set_hooks(*(BELOW.format(prefix, hook) for hook in ("prolog", "epilog")))
        yield
        sge.clear_jobs()
        own = gid_range(sge.lab, NODES.index(self.node) + 1)
        sge.set_conf("gid_range", own, host=self.node)
        sge.set_exechost(self.node, f"gpu={GPUS},gpuj={GPUS},slots=16")
        sge.qconf("-purge", "queue", "slots", queue)


def _share_keys(cards: Sequence[int]) -> dict[str, str]:
    shares = " ".join(f"{card}:4" for card in cards)
    return {"SGE_COMPLEXES": "gpu gpuj gpu_share=share", "SHARES": shares}
