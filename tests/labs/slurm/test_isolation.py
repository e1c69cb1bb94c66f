# SPDX-License-Identifier: Apache-2.0
"""The kernel keeps a job of a real Slurm without ConstrainDevices to its own GPUs."""

from __future__ import annotations

import pytest

from gpulock.isolation.tree import MARK
from tests.labs.common.device_nodes import opened
from tests.labs.common.installed import gate_file, reap, waiting_for
from tests.labs.slurm import evil as slurm_evil
from tests.labs.slurm.cluster import USERS
from tests.labs.slurm.confined import COUNT, EVERY, Site, confined_site
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.modes import NODE, wait_said
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab


@pytest.mark.short
@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
def test_every_step_of_a_job_opens_its_own_gpus_and_no_other(
    slurm_gpus: Gpulock, proctrack: str
) -> None:
    """A batch step, one of srun's, and a child that leaves its parents.

    By `cgroup`, of version 2, Slurm moves each task to a cgroup of its own after the session.
    """
    with confined_site(slurm_gpus, proctrack=proctrack) as site:
        go = gate_file(site.gpus, "go")
        child = f"(setsid sh -c '(sleep 0.3; echo child; {site.probe}; echo over) &' &)\n"
        text = f"{site.probe}\necho srun\nsrun {site.probe}\n{child}{waiting_for(go)}"
        job = site.submit("--gres=gpu:2", text=text)
        said = wait_said(site.gpus, job, "over")
        own = site.own(job)
        assert len(own) == 2
        first, _, rest = said.partition("srun\n")
        for part in (first, *rest.split("child\n")):
            assert opened(part) == {"ENXIO": own | {"nvidiactl"}, "EPERM": EVERY - own}
        wait_until(lambda: not site.service.strays(), why="the child to end")
        go.touch()
        assert site.slurm.wait_settled(job) == "COMPLETED"
        assert site.left() == []


@pytest.mark.attack
def test_a_hostile_environment_runs_nothing_as_root_and_opens_no_other_gpu(site: Site) -> None:
    """Tried: a whole kit of variables, files and programs, where sessions are confined.

    Stopped by: hooks have an environment of their own, and the job's cgroup closes other GPUs.
    """
    evil = slurm_evil.kit(site.gpus)
    preload = f"--export=ALL,LD_PRELOAD={evil.folder}/evil.so"
    text = f"#!/bin/bash\n{site.probe}\necho over\n/bin/sleep 600\n"
    words = ("-w", NODE, "--gres=gpu:1", preload)
    job = slurm_evil.submit(site.gpus, "slalice", words, evil.variables(), text)
    seen = opened(wait_said(site.gpus, job, "over"))
    own = site.own(job)
    site.slurm.scancel(job)
    site.slurm.wait_settled(job)
    assert seen == {"ENXIO": own | {"nvidiactl"}, "EPERM": EVERY - own}
    assert (evil.ran(0), "library" in evil.ran(USERS["slalice"])) == ("", True)


def test_a_step_that_cannot_be_confined_does_not_start(site: Site) -> None:
    mark = site.slurm.path_in(NODE, f"/run/gpulock.claims/{MARK}")
    site.slurm.wait_done(site.submit(text="true\n"))  # by it slurmd is closed
    mark.unlink()
    mark.mkdir()
    job = site.submit("--gres=gpu:1", text="echo ran\n")
    wait_until(lambda: site.slurm.is_out(NODE), why="the node to be drained")
    site.slurm.wait_state(job, "PENDING")
    site.slurm.scancel(job)
    assert "ran" not in site.slurm.said(job).split()
    assert site.left() == []
    site.gpus.wait_free()
    mark.rmdir()


@pytest.mark.short
def test_a_site_that_gives_isolation_up_has_its_gpus_back_and_may_take_it_up_again(
    site: Site,
) -> None:
    """slurmd stays in its closed cgroup, where its jobs start from then on."""
    for isolation in ("cgroup", "off", "cgroup"):
        site.configure(ISOLATION=isolation)
        reap(site.gpus, NODE)
        job = site.submit("--gres=gpu:1", text=site.probe)
        assert site.slurm.wait_done(job) == "COMPLETED"
        closed = len(opened(site.slurm.said(job)).get("EPERM", ()))
        assert closed == (COUNT - 1 if isolation == "cgroup" else 0)
