# SPDX-License-Identifier: Apache-2.0
"""A job's own rlimits never cost the node a queue, a lock or a second run of the job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.labs.common.installed import script
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import claims, on, said
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
NODE = NODES[0]
CAP_SYS_RESOURCE = 24
MEMORY = ("h_vmem=8M", "h_vmem=0", "h_vmem=1")  # no room for an interpreter: facts/grid-engine.md
ALL = "h_vmem=8M,h_data=1M,h_stack=16k,h_fsize=0,h_cpu=1"
OTHERS = ("h_data=1M", "h_stack=16k", "h_fsize=0", "h_cpu=1")
HARMLESS = (*OTHERS[1:], "h_vmem=64M,h_data=64M,h_stack=1M,h_fsize=1M,h_cpu=1")


def may_raise(gpus: Gpulock) -> bool:
    """Return whether execd's children may lift limits: CAP_SYS_RESOURCE is in its bounds."""
    status = Path(f"/proc/{gpus.sge.execd_pid(NODE)}/status").read_text()
    bounds = int(status.partition("CapBnd:")[2].split()[0], 16)
    return bool(bounds >> CAP_SYS_RESOURCE & 1)


def test_jobs_under_tiny_limits_run_once_or_are_refused_and_no_queue_stops(
    gpus: Gpulock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tried: `-l h_vmem`, `h_data`, `h_stack`, `h_fsize` and `h_cpu` that leave a hook no room.

    Stopped by: `drop-env` lifts them; where it may not, the job is at fault and no queue stops.
    """
    raising = may_raise(gpus)
    with capsys.disabled():
        print(f"\n[limits: root {'may' if raising else 'may not'} lift them here] ", end="")
    home = gpus.sge.users["glalice"].home
    asked = [*MEMORY, ALL, *OTHERS]
    jobs = {
        limits: gpus.sge.submit(
            "glalice",
            *on(NODE, "-l", f"gpu=1,{limits}"),
            stdin=f"echo x >>{home}/ran.{number}\n",
        )
        for number, limits in enumerate(asked)
    }
    ended = {limits: gpus.sge.wait_state(job, "", "Eqw") for limits, job in jobs.items()}
    gpus.wait_free()
    assert gpus.sge.queue_states()[NODE] == ""
    granted = claims(gpus, NODE)
    for number, (limits, job) in enumerate(jobs.items()):
        ran = home / f"ran.{number}"
        times = len(ran.read_text().splitlines()) if ran.exists() else 0
        failed = [record["failed"].split()[0] for record in gpus.sge.records(job)]
        if raising or limits in HARMLESS:
            assert ended[limits] == "", limits
        if ended[limits] == "":
            assert (times, failed) == (1, ["0"]), limits
            assert len(granted[str(job)]) == 1, limits
        else:
            assert times == 0 and failed == ["30"], limits
            assert re.search("limits.*ask for h", said(gpus, job)), limits
    if not raising:
        assert all(ended[limits] == "Eqw" for limits in (*MEMORY, ALL)), ended


def test_jobs_without_gpus_and_jobs_ended_by_a_limit_leave_the_queue_alone(gpus: Gpulock) -> None:
    """Tried: jobs that a limit of time or of file sizes ends, and one without GPUs and memory.

    Stopped by: `drop-env` lifts the limits before the hook, and an epilog ends with 0.
    """
    spin = "while :; do :; done\n"
    masked = gpus.sge.submit("glalice", *on(NODE, "-l", "h_vmem=8M"), stdin="echo ran\n")
    burner = gpus.sge.submit("glalice", *on(NODE, "-l", "h_cpu=1,gpu=1"), stdin=spin)
    writer = gpus.sge.submit(
        "glalice", *on(NODE, "-l", "h_fsize=0,gpu=1"), stdin="head -c 99999 /dev/zero >$HOME/big\n"
    )
    jobs = (masked, burner, writer)
    ended = [gpus.sge.wait_state(job, "", "Eqw") for job in jobs]
    gpus.wait_free()
    assert gpus.sge.queue_states()[NODE] == ""
    assert ended[1:] == ["", ""]
    assert all(len(gpus.sge.records(job)) == 1 for job in jobs)
    if may_raise(gpus):
        assert said(gpus, masked) == "ran\n"
    else:
        assert ended[0] == "Eqw" and "limits" in said(gpus, masked)


def test_a_large_environment_under_a_file_limit_refuses_the_job_and_not_the_node(
    gpus: Gpulock,
) -> None:
    """Tried: an environment that is longer than `h_fsize` lets a file be; its floor is 15 KiB.

    Stopped by: a prolog that cannot write it refuses that job alone.
    """
    large = ",".join(f"BIG{n}={'x' * 5000}" for n in range(8))
    job = gpus.sge.submit(
        "glalice", *on(NODE, "-v", large, "-l", "h_fsize=0,gpu=1"), stdin="echo ran\n"
    )
    ended = gpus.sge.wait_state(job, "", "Eqw")
    gpus.wait_free()
    assert gpus.sge.queue_states()[NODE] == ""
    if may_raise(gpus):
        assert ended == ""
    else:
        assert ended == "Eqw"
        limits = "under the job's own limits (h_vmem, h_data, h_stack, h_fsize)"
        assert f"invalid request: {limits}: its environment is too large" in said(gpus, job)


def test_the_limits_of_a_hook_are_those_of_the_job(gpus: Gpulock) -> None:
    """Tried: a hook of the site's: it runs under the job's own `h_vmem`, as shepherds have it.

    Stopped by: nothing here; `drop-env` is what such a hook lacks.
    """
    home = gpus.sge.users["glalice"].home
    seen = home / "limits"
    path = script(gpus, "show-limits", f"#!/bin/sh\nulimit -v >{seen}\nexit 0\n")
    gpus.sge.set_hooks(f"root@{path}", "NONE")
    job = gpus.sge.submit("glalice", *on(NODE, "-l", "h_vmem=8M"), stdin="true\n")
    gpus.sge.wait_settled(job)
    assert wait_until(lambda: seen.read_text().strip(), why="the limits") == "10240"
