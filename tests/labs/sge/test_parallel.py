# SPDX-License-Identifier: Apache-2.0
"""Slave tasks of a parallel job get the GPUs of their own host, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import psutil
import pytest

from tests.labs.common.installed import reap
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import said, stopped_queues
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
MPI = ("-q", "gpu.q", "-pe", "mpi", "6", "-l", "gpu=1")
ASK = 'echo "$(hostname) CVD=${CUDA_VISIBLE_DEVICES-unset} refused=${GPULOCK_REFUSED-}"'
# one task after the other on each host of the job, then all at once
SERIAL = f"for h in $(cut -d' ' -f1 $PE_HOSTFILE); do qrsh -inherit $h '{ASK}'; done\n"
SLEEP = ["sleep", "300"]
HOLD = "for h in $(cut -d' ' -f1 $PE_HOSTFILE); do qrsh -inherit $h sleep 300 & done\nwait\n"


@contextlib.contextmanager
def slave_tasks(gpus: Gpulock) -> Generator[None]:
    """Start slave tasks by gpulock on every node, whose settings say so."""
    hooks = gpus.hooks.folder / "prolog"
    for node in NODES:
        gpus.sge.set_conf("shepherd_cmd", f"{hooks}/sge_shepherd", host=node)
    gpus.sge.qconf("-rattr", "queue", "starter_method", f"{hooks}/sge-starter", "gpu.q")
    until_wrapped(gpus)
    yield
    gpus.sge.clear_jobs()
    for node in NODES:
        gpus.sge.set_conf("shepherd_cmd", "none", host=node)
    gpus.sge.qconf("-rattr", "queue", "starter_method", "NONE", "gpu.q")


@pytest.fixture
def tasks(gpus: Gpulock) -> Iterator[Gpulock]:
    """Give slave tasks their GPUs on every node."""
    for node in NODES:
        gpus.configure(node, SGE_SLAVE_TASKS="yes")
    with slave_tasks(gpus):
        yield gpus


def until_wrapped(gpus: Gpulock) -> None:
    """Wait until every execd has read its new configuration: a probe task says so."""

    def wrapped() -> bool | None:
        job = gpus.sge.submit("glalice", "-j", "y", *MPI, stdin=SERIAL)
        if gpus.sge.wait_state(job, "", "Eqw"):  # what isolation refuses until its host has read it
            gpus.sge.qdel(str(job))
            return None
        lines = [line for line in said(gpus, job).splitlines() if "CVD=" in line]
        return True if len(lines) == 3 and not any("unset" in line for line in lines) else None

    wait_until(wrapped, why="execds to start shepherds by gpulock")
    for node in NODES:
        reap(gpus, node)


def test_tasks_share_the_grant_of_their_own_host_and_the_reaper_frees_it(tasks: Gpulock) -> None:
    job = tasks.sge.submit("glalice", "-j", "y", *MPI, stdin=SERIAL + HOLD)
    wait_until(
        lambda: all(len(held) == 2 for held in tasks.held_by(job).values()) or None,
        why="two GPUs to be held on every host",
    )
    expected = sorted(f"{node} CVD=0,1 refused=" for node in NODES)
    wait_until(
        lambda: sorted(x for x in said(tasks, job).splitlines() if "CVD=" in x) == expected,
        why="each host's task to show its GPUs",
    )
    # until a shepherd has its handlers, execd's SIGTTIN stops it for good (8.1.9)
    wait_until(
        lambda: (
            [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])].count(SLEEP)
            == len(NODES)
        ),
        why="every task to run",
    )
    for node in NODES:
        assert reap(tasks, node).acts() == [("held", "alive")] * 2
    tasks.sge.qdel(str(job))
    tasks.sge.wait_done(job)

    seen = {node: "" for node in NODES}

    def freed() -> bool:
        seen.update({node: reap(tasks, node).reasons() for node in NODES})
        return not any(tasks.locks(node) for node in NODES)

    wait_until(freed, why=lambda: f"the reaper to free every host\n{seen}")


def test_a_task_that_cannot_have_its_gpus_says_so_and_does_not_run(tasks: Gpulock) -> None:
    blocked = NODES[2]
    holder = tasks.sge.submit("glbob", "-q", "gpu.q", "-l", f"gpu=7,h={blocked}", stdin="sleep 300")
    tasks.sge.wait_running(holder)
    tasks.sge.set_exechost(blocked, "gpu=16,gpuj=8,slots=16")
    try:
        first = ("-masterq", f"gpu.q@{NODES[0]}")  # a prolog would send the whole job back
        job = tasks.sge.submit("glalice", "-j", "y", *first, *MPI, stdin=SERIAL)
        tasks.sge.wait_done(job)
        text = said(tasks, job)
    finally:
        tasks.sge.set_exechost(blocked, "gpu=8,gpuj=8,slots=16")
    assert "busy: 2 GPUs asked for, 1 of 8 free" in text
    assert f"{blocked} CVD" not in text
    assert len([line for line in text.splitlines() if "CVD=0,1" in line]) == 2


def test_a_task_whose_hook_cannot_start_ends_its_job_with_the_reason(tasks: Gpulock) -> None:
    """qrsh waited for 60 s, and nobody learned why: an interpreter that the admin user lacks."""
    hook = tasks.hooks.folder / "prolog/sge-slave"
    text = hook.read_text()
    first = ("-masterq", f"gpu.q@{NODES[0]}")
    hook.write_text("#!/nowhere/python3 -IS\n" + text.partition("\n")[2])
    try:
        job = tasks.sge.submit("glalice", "-j", "y", *first, *MPI, stdin=SERIAL)
        tasks.sge.wait_done(job)
    finally:
        hook.write_text(text)
    told = "\n".join(map(tasks.sge.messages, NODES))
    assert f"{hook} ended with 127, so no task can start on this node" in told
    assert stopped_queues(tasks) == {}


def test_a_parallel_job_without_gpus_is_masked_on_every_host(tasks: Gpulock) -> None:
    job = tasks.sge.submit("glalice", "-j", "y", "-q", "gpu.q", "-pe", "mpi", "6", stdin=SERIAL)
    tasks.sge.wait_done(job)
    lines = [line for line in said(tasks, job).splitlines() if "CVD=" in line]
    assert len(lines) == 3 and all("CVD= refused=" in line for line in lines)
