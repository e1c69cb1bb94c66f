# SPDX-License-Identifier: Apache-2.0
"""A job of the demo: what hooks see of its shepherd, and what is left of it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.demo.stage import DemoJob, DemoNode
from tests.support.execd import SimulatedJob
from tests.support.faults import raising
from tests.support.wait import wait_ended

Play = Callable[..., DemoJob]
NUMBERS = itertools.count(1)
WAITING = 'echo job $A; read -r _ < "$0"'


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> DemoNode:
    """A node whose hooks each job replaces."""
    return DemoNode(tmp_path_factory.mktemp("stage"))


@pytest.fixture
def play(stage: DemoNode, tmp_path: Path) -> Iterator[Play]:
    """Return what makes a job with hooks of a line of shell each."""
    made: list[DemoJob] = []

    def make(prolog: str = "", epilog: str = "") -> DemoJob:
        for path, text in ((stage.hooks.prolog, prolog), (stage.hooks.epilog, epilog)):
            path.write_text(f"#!/bin/sh\n{text}\n")
        bell = tmp_path / "bell"
        os.mkfifo(bell)
        job = SimulatedJob(next(NUMBERS), ("/bin/sh", "-c", WAITING, str(bell)))
        made.append(DemoJob(stage, job, bell))
        return made[0]

    yield make
    for one in made:
        one.close()


def family(stat: str) -> tuple[int, int, int]:
    """Return parent, process group and session of a process."""
    fields = stat.rpartition(") ")[2].split()
    return int(fields[1]), int(fields[2]), int(fields[3])


def test_hooks_and_job_are_of_a_shepherd_in_the_spool_folder(play: Play, tmp_path: Path) -> None:
    job = play(f"cat /proc/self/stat >{tmp_path}/stat; env >{tmp_path}/env")
    job.start()
    proc, shepherd = Path("/proc"), job.shepherd.pid
    assert (proc / f"{shepherd}/comm").read_text() == "sge_shepherd\n"
    assert (proc / f"{shepherd}/cwd").readlink() == job.spooled.folder
    stat = (proc / f"{job.pid}/stat").read_text()
    assert family(stat) == (shepherd, job.pid, shepherd)
    assert family((tmp_path / "stat").read_text())[2] != shepherd
    env = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    mine = {"JOB_ID": job.name, "SGE_TASK_ID": "0", "QUEUE": "gpu.q", "PATH": "/usr/bin:/bin"}
    assert {name: env[name] for name in env if name not in ("PWD", "SHLVL", "_")} == mine


def test_prolog_job_and_epilog_run_one_after_another_and_print_into_one_file(play: Play) -> None:
    job = play("echo prolog >&2; echo A=1 >>environment", "echo epilog")
    job.start()
    job.finish()
    assert job.output() == "prolog\njob 1\nepilog\n"
    assert not Path(f"/proc/{job.shepherd.pid}").exists()


def test_after_a_prolog_that_fails_no_job_runs_but_its_epilog(play: Play) -> None:
    job = play("exit 99", "echo epilog")
    job.start()
    assert (job.prolog_status, job.output()) == (99, "epilog\n")
    with pytest.raises(FileNotFoundError):
        assert job.pid


def test_a_job_lives_on_when_its_shepherd_is_killed_until_it_is_closed(play: Play) -> None:
    job = play()
    job.start()
    job.kill_shepherd()
    assert not Path(f"/proc/{job.shepherd.pid}").exists()
    assert Path(f"/proc/{job.pid}/comm").read_text() == "sh\n"
    job.close()
    wait_ended([job.pid], why="the job to end")


def test_when_the_demo_is_interrupted_a_hook_still_ends(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would write into a folder that is being removed."""
    job = play(f"sleep 0.2; touch {tmp_path}/late")
    monkeypatch.setattr(job.shepherd, "_line", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        job.start()
    job.close()
    assert capfd.readouterr().err == ""
    assert (tmp_path / "late").exists()
