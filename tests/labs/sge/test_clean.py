# SPDX-License-Identifier: Apache-2.0
"""LEFTOVER_PROCESSES on a real Grid Engine: the epilog ends what its own job left, and no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs.both.sge_site import SgeSite
from tests.labs.common.installed import gate_file
from tests.labs.common.processes import children_of, command_of, end, parent_of, running
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import carriers, on, sparing_execd, waiting_for
from tests.labs.sge.lab import JobId
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE = NODES[0]
DEAF = "trap '' TERM HUP INT"


@pytest.fixture
def sparing(gpus: Gpulock) -> Iterator[Gpulock]:
    """Let execd leave daemonised children of a job alone: otherwise it ends them itself."""
    with sparing_execd(gpus, NODE):
        yield gpus


def left(gpus: Gpulock, child: str, count: int = 1) -> tuple[JobId, int]:
    """Let a job leave daemonised children behind that are deaf to TERM; return it, and its group.

    The job ends when the gate file `go` is touched.
    """
    go = gate_file(gpus, "go")
    text = f"(setsid sh -c '(setsid sh -c \"{child}\" >/dev/null 2>&1 &)' &)\n" * count
    words = on(NODE, "-l", "gpu=1")
    job = gpus.sge.submit("glalice", *words, stdin=f"{text}{waiting_for(go)}")
    gpus.sge.wait_running(job)
    gid, shepherd = gpus.record_of(NODE, job).add_grp_id, gpus.sge.shepherd_pid(job)

    def alone() -> bool:
        said = {pid: command_of(pid) for pid in carriers(gid)}
        own = {shepherd, *said}  # a process with a parent among these is none
        away = [pid for pid in said if said[pid] and parent_of(pid) not in own]
        # who starts one is on its way out by then, or the job's shell that has yet to exec
        begun = [pid for pid in away if "/job_scripts/" not in said[pid]]
        return len(begun) >= count and not any("setsid" in words for words in said.values())

    wait_until(alone, why=lambda: f"its children\n{[*map(command_of, carriers(gid))]!s}")
    return job, gid


def leave(gpus: Gpulock, job: JobId) -> None:
    """Let the job end, its epilog included."""
    (gpus.sge.users["glalice"].home / "go").touch()
    gpus.sge.wait_done(job)


def test_daemonised_children_deaf_to_term_are_ended_and_a_neighbour_is_not(
    sparing: Gpulock,
) -> None:
    sparing.configure(NODE, LEFTOVER_PROCESSES="kill")
    site = SgeSite(sparing)
    neighbour = site.start(1)
    others = site.sleepers(neighbour)
    job, gid = left(sparing, f"{DEAF}; while :; do sleep 1; done", count=3)
    leave(sparing, job)
    assert carriers(gid) == []
    assert sparing.held_by(job)[NODE] == []
    assert site.processes(neighbour) == others
    assert len(site.held(neighbour)) == 1


def test_a_users_fifo_in_which_a_shepherd_hangs_keeps_nobodys_remains_alive(
    sparing: Gpulock,
) -> None:
    sparing.configure(NODE, LEFTOVER_PROCESSES="kill")
    text = "rm -f $SGE_STDOUT_PATH; mkfifo $SGE_STDOUT_PATH\n"
    hostile = sparing.sge.submit("glbob", *on(NODE, "-l", "gpu=1"), stdin=text)
    sparing.sge.wait_running(hostile)
    shepherd, gid = sparing.sge.shepherd_pid(hostile), sparing.record_of(NODE, hostile).add_grp_id
    wait_until(lambda: not carriers(gid), why="the job's end")
    forks = wait_until(lambda: children_of(shepherd), why="its epilog to hang")
    try:
        for hanging in (shepherd, None):
            if hanging is None:
                end([shepherd])  # its fork hangs on
            job, gid = left(sparing, "exec sleep 600")
            leave(sparing, job)
            assert carriers(gid) == []
            assert sparing.held_by(job)[NODE] == []
            assert all(map(running, forks))
    finally:
        end([shepherd, *forks])
