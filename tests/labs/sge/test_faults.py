# SPDX-License-Identifier: Apache-2.0
"""Whatever is at fault on a node or at qmaster: the documented refusal, and nothing half done."""

from __future__ import annotations

import shutil

import pytest

from tests.labs.common.installed import (
    gate_file,
    reap,
    script,
    shut_gate,
)
from tests.labs.common.processes import end
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import (
    at_gate,
    claims,
    held,
    hook_of,
    on,
    records,
    said,
    stopped_queues,
    wait_refused,
    wait_said,
)
from tests.labs.sge.lab import JobId
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE, OTHER = NODES[:2]
SHOW = "echo mask=${CUDA_VISIBLE_DEVICES-unset};\n"
# by the job's name: `lost*` loses execd's file of the job, `strange*`
# makes it an unknown Grid Engine's, `wait*` waits for a file
AROUND = """#!/bin/sh
PATH=/usr/bin:/bin
case $JOB_NAME in
*wait*) until [ -e {go} ]; do sleep 0.1; done ;;
esac
case $JOB_NAME in
*lost*) cd -P /proc/$PPID/cwd && rm ../../jobs/*/*/$(printf %04d "$JOB_ID").* ;;
esac
case $JOB_NAME in
*strange*)
    cd -P /proc/$PPID/cwd
    file=$(echo ../../jobs/*/*/$(printf %04d "$JOB_ID").*)
    printf '\\020\\003' | dd of="$file" bs=1 seek=4 conv=notrunc 2>/dev/null
    ;;
esac
cd /
exec {start} {prolog} "$JOB_ID" "$SGE_TASK_ID" "$QUEUE"
"""


@pytest.fixture
def around(gpus: Gpulock) -> Gpulock:
    """Let a job's name decide what befalls it before its prolog."""
    go = gate_file(gpus, "go")
    hooks = gpus.hooks
    text = AROUND.format(go=go, start=hooks.drop_env, prolog=hooks.prolog)
    line = (
        "root@/usr/bin/env -i JOB_NAME=$job_name JOB_ID=$job_id SGE_TASK_ID=$ja_task_id "
        f"QUEUE=$queue {script(gpus, 'around', text)}"
    )
    gpus.sge.set_hooks(line, gpus.line("epilog"))
    return gpus


def submit(gpus: Gpulock, node: str, count: int, name: str, user: str = "glalice") -> JobId:
    """Submit a job that shows its mask."""
    more = ("-l", f"gpu={count}") if count else ()
    return gpus.sge.submit(user, *on(node, *more, "-N", name), stdin=SHOW)


def test_without_execds_file_no_job_starts_and_no_queue_stops(around: Gpulock) -> None:
    jobs = [submit(around, NODE, count, "lost") for count in (2, 0)]
    for job in jobs:
        around.sge.wait_state(job, "Rq")
        assert "unknown: execd has no file of this job" in said(around, job, "lost")
        assert "mask=" not in said(around, job, "lost")
        assert {r["failed"].split()[0] for r in records(around, job)} == {"25"}
    assert stopped_queues(around) == {}
    assert claims(around, NODE) == {}


def test_a_prolog_that_is_killed_sends_its_job_back_and_no_queue_stops(gpus: Gpulock) -> None:
    """Out of memory, the kernel kills what it likes."""
    with shut_gate(gpus, NODE):
        job = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=2"), stdin=SHOW)
        gpus.sge.wait_state(job, "r")
        spool = gpus.sge.spool_dir(job) / "pid"
        wait_until(spool.is_file, why="its shepherd")
        hook = hook_of(gpus, int(spool.read_text()))
        wait_until(lambda: at_gate(hook), why="its prolog to wait at the gate")
        end([hook])
        gpus.sge.wait_state(job, "Rq", "Rr")
    assert stopped_queues(gpus) == {}
    assert "ended by signal 9, so the job goes back" in wait_said(gpus, job, "mask=0,1\n")
    gpus.sge.wait_done(job)
    assert held(gpus, NODE, job) == []


def test_jobs_of_an_unknown_grid_engine_wait_and_no_queue_stops(around: Gpulock) -> None:
    jobs = {
        submit(around, OTHER, count, f"strange{number}", user): (f"strange{number}", user)
        for number, (user, count) in enumerate(
            (("glalice", 1), ("glbob", 0), ("glalice", 2), ("glbob", 1))
        )
    }
    for job, (name, user) in jobs.items():
        around.sge.wait_state(job, "Rq")
        assert "another version of Grid Engine" in said(around, job, name, user)
        assert "mask=" not in said(around, job, name, user)
    assert stopped_queues(around) == {}
    assert claims(around, OTHER) == {}


def test_without_qmaster_prologs_and_epilogs_of_dispatched_jobs_work_from_execds_file(
    around: Gpulock,
) -> None:
    going = submit(around, NODE, 2, "wait")
    lost = submit(around, NODE, 1, "wait_lost")
    spool = around.sge.lab / "spool" / NODE / "active_jobs"
    wait_until(
        lambda: all((spool / f"{job}.1/pid").exists() for job in (going, lost)), why="two shepherds"
    )
    for job in (going, lost):
        around.sge.wait_state(job, "r")  # else qmaster may not know that they were sent
    around.sge.stop_qmaster()
    try:
        (around.sge.users["glalice"].home / "go").touch()
        wait_said(around, going, "mask=0,1", name="wait")
        wait_said(around, lost, "unknown: ", name="wait_lost")
        around.wait_free()
        assert "mask=" not in said(around, lost, "wait_lost")
    finally:
        around.sge.start_qmaster()
    around.sge.wait_queue(NODE, "")
    around.sge.wait_settled(going)
    assert records(around, going)[-1]["failed"] == "0"


def test_a_state_directory_that_is_emptied_stops_no_queue(gpus: Gpulock) -> None:
    """`rm -rf /var/lib/gpulock/*`: every job with GPUs put its queue into error."""
    before = submit(gpus, NODE, 1, "before")
    gpus.sge.wait_done(before)
    folder = gpus.sge.path_in(NODE, "/var/lib/gpulock")
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    job = submit(gpus, NODE, 1, "job")
    gpus.sge.wait_settled(job)
    assert "quarantine was lost" in said(gpus, job, "job")
    assert "mask=0" in said(gpus, job, "job")
    assert gpus.sge.queue_states("gpu.q")[NODE] == ""
    assert "quarantine was lost" in gpus.command(NODE, "doctor").stdout
    (folder / "quarantine.lost").unlink()


def test_hooks_without_their_interpreter_stop_the_queue_and_never_touch_a_finished_job(
    gpus: Gpulock,
) -> None:
    broken = gpus.sge.lab / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(gpus.hooks.folder, broken)
    for hook in ("prolog/sge", "epilog/sge"):
        rest = (broken / hook).read_text().partition("\n")[2]
        (broken / hook).write_text(f"#!/nonexistent/python3 -IS\n{rest}")

    def line(hook: str) -> str:
        return gpus.line(hook).replace(str(gpus.hooks.folder), str(broken))

    gpus.sge.set_hooks(gpus.line("prolog"), line("epilog"), queues=["cpu.q"])
    gpus.sge.set_hooks(line("prolog"), gpus.line("epilog"), queues=["gpu.q"])
    stopped = submit(gpus, NODE, 1, "stopped")
    words = ("-j", "y", "-q", "cpu.q", "-l", f"h={OTHER},gpu=1", "-N", "ended")
    ended = gpus.sge.submit("glalice", *words, stdin=SHOW)
    wait_refused(gpus, NODE, stopped)
    gpus.sge.wait_settled(ended)
    assert said(gpus, ended, "ended").startswith("mask=0\n")
    assert [r["failed"].split()[0] for r in records(gpus, ended)] == ["0"]
    assert gpus.sge.queue_states("cpu.q")[OTHER] == ""
    assert reap(gpus, OTHER).acts() == [("freed", "dead")]
