# SPDX-License-Identifier: Apache-2.0
"""Whatever is at fault, however a job ends: the documented refusal, and no lock leaks."""

from __future__ import annotations

import pytest

from tests.labs.common.installed import SOAK, gate_file, shut_gate
from tests.labs.common.processes import end, wait_at_gate
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import on, started, stopped_queues, wait_said, waiting_for

pytestmark = pytest.mark.lab
NODE, OTHER = NODES[:2]
SHOW = "echo mask=${CUDA_VISIBLE_DEVICES-unset};\n"


def test_a_prolog_that_is_killed_sends_its_job_back_and_no_queue_stops(gpus: Gpulock) -> None:
    """Out of memory, the kernel kills what it likes."""
    with shut_gate(gpus, NODE):
        job = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=2"), stdin=SHOW)
        end([wait_at_gate("prolog")])
        gpus.sge.wait_state(job, "Rq", "Rr")
    assert stopped_queues(gpus) == {}
    assert "ended by signal 9, so the job goes back" in wait_said(gpus, job, "mask=0,1\n")
    gpus.sge.wait_done(job)
    assert gpus.held_by(job)[NODE] == []


# --- the ends of jobs -----------------------------------------------------------------------------


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
        first = gpus.record_of(NODE, job)
        if kind == "exit 99":
            ready.touch()
        else:
            gpus.sge.qmod("-rj", str(job))
        wait_said(gpus, job, "run=1")
        second = gpus.record_of(NODE, job)
        assert second.run() != first.run() and second.token != first.token
        assert second.pid == gpus.sge.shepherd_pid(job)
        assert len(gpus.held_by(job)[NODE]) == len(gpus.locks(NODE)) == 2
        gpus.sge.qdel(str(job))
        gpus.sge.wait_done(job)
        gpus.wait_free()
