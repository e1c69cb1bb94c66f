# SPDX-License-Identifier: Apache-2.0
"""What Slurm itself tells hooks and does about them, as gpulock relies on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labs.slurm.config import Gres, Setup
from tests.labs.slurm.lab import ENDED, JobId, Slurm
from tests.labs.slurm.releases import FORGETS
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab


_SETUP = Setup(gpus=4)
# Writes the environment of any hook to a file named after context, job and node.
_DUMP = """#!/bin/sh
/usr/bin/env >"{folder}/$SLURM_SCRIPT_CONTEXT.$SLURM_JOB_ID.$SLURMD_NODENAME"
"""
_CONTEXT = {"Prolog": "prolog_slurmd", "Epilog": "epilog_slurmd", "TaskProlog": "prolog_task"}


@pytest.fixture(scope="module")
def lab() -> Iterator[Slurm]:
    """Bring up a lab of two nodes, beside the one that other tests have."""
    # Not below pytest's temporary folder, which only its user may enter.
    with Slurm(_SETUP, nodes=2, names="own", lab="/tmp/gpulock-lab-own") as slurm:
        yield slurm


@pytest.fixture
def own(lab: Slurm) -> Iterator[Slurm]:
    """Give a test the lab, with its logs where the test fails, and without what it left."""
    if lab.setup != _SETUP:
        lab.reconfigure(**vars(_SETUP))
    written = lab.watch_logs()
    yield lab
    print(written())
    lab.recover()


def _hooks(own: Slurm) -> dict[str, str | Path]:
    folder = own.lab / "dumps"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)
    program = own.lab / "dump"
    program.write_text(_DUMP.format(folder=folder))
    program.chmod(0o755)
    return dict.fromkeys(_CONTEXT, program)


def _dumped(own: Slurm, hook: str, job: JobId, node: str) -> dict[str, str]:
    lines = (own.lab / "dumps" / f"{_CONTEXT[hook]}.{job}.{node}").read_text().splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_heterogeneous_job_has_a_prolog_for_every_component(own: Slurm) -> None:
    own.reconfigure(hooks=_hooks(own))
    first, second = own.nodes
    words = (f"-w{first}", "--gres=gpu:1", ":", f"-w{second}", "--gres=gpu:2")
    job = own.submit("slalice", *words, script="srun --het-group=0,1 hostname\n")
    assert own.wait_settled(job) == "COMPLETED"
    assert sorted(own.said(job).split()) == [first, second]
    component = _dumped(own, "Prolog", JobId(job + 1), second)
    assert (component["SLURM_HET_JOB_ID"], component["SLURM_JOB_GPUS"]) == (str(job), "0,1")
    assert _dumped(own, "TaskProlog", job, second)["SLURM_STEP_GPUS"] == "0,1"


def test_a_job_that_begins_again_at_once_has_no_prolog_on_22_05_alone(own: Slurm) -> None:
    own.reconfigure(hooks=_hooks(own))
    newer = own.release >= FORGETS
    steps = wait_until(lambda: _second_steps(own, newer), why="a job's second run")
    assert steps == (["batch", "extern"] if newer else ["batch"])


def _second_steps(own: Slurm, prolog: bool) -> list[str] | None:
    """Return the steps of a job that began again at once, with its Prolog or without.

    None where it was refused, or where that was otherwise.
    """
    job = own.submit("slalice", script="exec sleep 600\n")
    own.wait_running(job)
    dump = own.lab / f"dumps/prolog_slurmd.{job}.{own.job(job)['BatchHost']}"
    own.requeue(job)
    own.wait_state(job, "PENDING")
    own.wait_stepless(job)
    dump.unlink()
    own.begin(job, at_once=True)
    wait_until(
        lambda: own.state(job) in ENDED or own.job_processes(job) != [], why="the second run"
    )
    found = sorted(step.name for step in own.steps(job))
    own.scancel(job)
    own.wait_done(job)
    return found if found and dump.exists() == prolog else None


@pytest.mark.short
@pytest.mark.parametrize(
    ("gres", "words", "gpus", "visible"),
    [
        ("slurm", "--gres=gpu:2", "0,1", "0,1"),
        ("gpulock", "--gres=gpu:2", "0,1", None),
        ("count", "--gres=gpux:2", None, None),
        ("none", "-n1", None, None),
    ],
)
def test_hooks_see_the_variables_of_their_mode(
    own: Slurm, gres: Gres, words: str, gpus: str | None, visible: str | None
) -> None:
    own.reconfigure(gres=gres, hooks=_hooks(own))
    job = own.submit("slalice", "-w", own.nodes[0], words)
    assert own.wait_done(job) == "COMPLETED"
    for hook in _CONTEXT:
        seen = _dumped(own, hook, job, own.nodes[0])
        assert seen["SLURM_JOB_ID"] == str(job)
        assert seen["SLURM_JOB_UID"] == str(own.users["slalice"].uid)
        assert (seen.get("SLURM_JOB_GPUS"), seen.get("CUDA_VISIBLE_DEVICES")) == (gpus, visible)
        assert ("PATH" in seen) == (hook == "TaskProlog")
    assert _dumped(own, "Prolog", job, own.nodes[0])["SLURM_JOB_RESTART_COUNT"] == "0"


def test_a_task_prolog_sets_what_the_job_sees(own: Slurm) -> None:
    program = own.lab / "task-prolog"
    program.write_text("#!/bin/sh\necho export CUDA_VISIBLE_DEVICES=7\n")
    program.chmod(0o755)
    own.reconfigure(hooks={"TaskProlog": program})
    job = own.submit("slalice", "--gres=gpu:1", script="echo $CUDA_VISIBLE_DEVICES\n")
    own.wait_settled(job)
    assert own.said(job) == "7\n"


def test_devices_have_the_order_and_types_asked_for(own: Slurm) -> None:
    first, second = own.nodes
    own.reconfigure(order={first: (3, 1, 0, 2)}, types={0: "a", 1: "b", 2: "b", 3: "a"})
    shown = own.run_in(first, ["slurmd", "-G"]).stderr
    assert re.findall(r"Type=(\w) .*nvidia(\d)", shown) == [
        *(("a", "3"), ("a", "0")),  # by type, then as in gres.conf
        *(("b", "1"), ("b", "2")),
    ]
    done = own.srun("slbob", "-w", second, "--gres=gpu:b:1", "printenv", "CUDA_VISIBLE_DEVICES")
    assert done.stdout == "2\n"  # a position: those of type a are 0 and 1
