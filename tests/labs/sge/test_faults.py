# SPDX-License-Identifier: Apache-2.0
"""Whatever is at fault, however a job ends: the documented refusal, and no lock leaks."""

from __future__ import annotations

import shutil

import pytest

from gpulock.store.owner import Owner
from tests.labs.common.installed import SOAK, gate_file, reap, shut_gate
from tests.labs.common.processes import end, wait_at_gate
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import (
    SLEEP,
    claims,
    held,
    on,
    records,
    said,
    started,
    stopped_queues,
    wait_refused,
    wait_said,
    waiting_for,
)
from tests.labs.sge.lab import JobId

pytestmark = pytest.mark.lab
NODE, OTHER = NODES[:2]
SHOW = "echo mask=${CUDA_VISIBLE_DEVICES-unset};\n"


def submit(gpus: Gpulock, node: str, count: int, name: str, user: str = "glalice") -> JobId:
    """Submit a job that shows its mask."""
    more = ("-l", f"gpu={count}") if count else ()
    return gpus.sge.submit(user, *on(node, *more, "-N", name), stdin=SHOW)


def test_a_prolog_that_is_killed_sends_its_job_back_and_no_queue_stops(gpus: Gpulock) -> None:
    """Out of memory, the kernel kills what it likes."""
    with shut_gate(gpus, NODE):
        job = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=2"), stdin=SHOW)
        end([wait_at_gate("prolog")])
        gpus.sge.wait_state(job, "Rq", "Rr")
    assert stopped_queues(gpus) == {}
    assert "ended by signal 9, so the job goes back" in wait_said(gpus, job, "mask=0,1\n")
    gpus.sge.wait_done(job)
    assert held(gpus, NODE, job) == []


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


# --- the ends of jobs -----------------------------------------------------------------------------


def record_of(gpus: Gpulock, node: str, job: JobId) -> Owner:
    """Return the record of one lock of a job."""
    return next(r for r in gpus.locks(node).values() if r.job_id == str(job))


def test_jobs_that_are_deleted_by_force_or_run_out_of_time_give_back_at_once(gpus: Gpulock) -> None:
    forced = started(gpus, NODE, 2)
    timed = started(gpus, NODE, 2, SLEEP, "-l", "h_rt=10")
    granted = claims(gpus, NODE)  # one that runs out of time may have given back by now
    assert {job: len(devices) for job, devices in granted.items()} == {
        str(forced): 2,
        str(timed): 2,
    }
    gpus.sge.qdel("-f", str(forced))
    for job in (forced, timed):
        gpus.sge.wait_done(job)
    gpus.wait_free()
    assert gpus.sge.queue_states()[NODE] == ""


def test_a_job_that_runs_again_gets_locks_of_its_new_run_and_nothing_leaks(gpus: Gpulock) -> None:
    """One at a time: with two, qmaster sends a job back while it is still ending (8.1.9)."""
    kinds = ("exit 99", "qmod -rj") if SOAK else ("exit 99",)
    for kind in kinds:
        ready = gate_file(gpus, "ready")
        text = (
            "echo run=$RESTARTED mask=$CUDA_VISIBLE_DEVICES\n"
            f"[ $RESTARTED = 1 ] && exec sleep 600\n{waiting_for(ready)}exit 99\n"
        )
        job = started(gpus, NODE, 2, text, "-r", "y")
        first = record_of(gpus, NODE, job)
        if kind == "exit 99":
            ready.touch()
        else:
            gpus.sge.qmod("-rj", str(job))
        wait_said(gpus, job, "run=1")
        second = record_of(gpus, NODE, job)
        assert second.run() != first.run() and second.token != first.token
        assert second.pid == gpus.sge.shepherd_pid(job)
        assert len(held(gpus, NODE, job)) == len(gpus.locks(NODE)) == 2
        gpus.sge.qdel(str(job))
        gpus.sge.wait_done(job)
        gpus.wait_free()
