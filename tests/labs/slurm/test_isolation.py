# SPDX-License-Identifier: Apache-2.0
"""The kernel keeps a job of a real Slurm without ConstrainDevices to its own GPUs."""

from __future__ import annotations

import pytest

from gpulock.isolation.marks import MARK
from tests.labs.common.device_nodes import TREES, modes, opened
from tests.labs.containers import job as container_job
from tests.labs.containers.job import CDI, STARTS, WITH_DRIVER
from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.slurm import evil as slurm_evil
from tests.labs.slurm.config import UNIFIED
from tests.labs.slurm.confined import COUNT, EVERY, Site, confined_site
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import SOAK, gate_file, kill_steps, reap, waiting_for
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.machines import USERS
from tests.labs.slurm.modes import NODE, wait_empty, wait_said
from tests.support.pairs import zip_equal
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
ROWS = 25 if SOAK else 1
ROW = 20  # jobs, some of them at once


@pytest.mark.short
def test_every_step_of_a_job_opens_its_own_gpus_and_no_other(site: Site) -> None:
    every_step_opens_its_own_gpus(site)


@pytest.mark.short
def test_every_step_does_so_where_slurm_keeps_cgroups(slurm_gpus: Gpulock) -> None:
    """Of version 2, where Slurm moves each task to a cgroup of its own after the session."""
    with confined_site(slurm_gpus, proctrack="cgroup") as site:
        every_step_opens_its_own_gpus(site)


def every_step_opens_its_own_gpus(site: Site) -> None:
    """Expect so of a batch step, of one of srun's, and of a child that leaves its parents."""
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


def test_a_job_opens_its_own_gpus_and_no_other_from_any_container(site: Site) -> None:
    machine, settings = site.slurm.machines[NODE], site.gpus.node(NODE).settings
    go = gate_file(site.gpus, "go")
    with container_job.fitted(machine, site.dev, settings) as boxes:
        site.configure(LEFTOVER_PROCESSES="kill", **boxes.keys)
        assert site.gpus.command(NODE, "cdi", "--write").returncode == 0
        text = f"echo mine=$CUDA_VISIBLE_DEVICES\n{boxes.script()}{waiting_for(go)}"
        job = site.submit("--gres=gpu:2", text=text)
        said = wait_said(site.gpus, job, "\nout\n")
        own = site.own(job)
        go.touch()
        assert site.slurm.wait_settled(job) == "COMPLETED"
        assert site.left() == []  # of podman neither, which leaves a process of its own behind
    boxed = container_job.seen(said)
    print(said)
    mine = {"ENXIO": own | {"nvidiactl"}}
    every = {name: {**mine, "EPERM": EVERY - own} for name in STARTS}
    assert {name: one.opens for name, one in boxed.items()} == {**every, CDI: mine}
    assert {one.mask for one in boxed.values()} == {said.partition("mine=")[2].split()[0]}
    assert {name for name, one in boxed.items() if one.driver == boxes.version} == WITH_DRIVER


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


@pytest.mark.attack
def test_two_jobs_of_one_user_cannot_open_each_others_gpu(site: Site) -> None:
    """Tried: a job opens every GPU, beside another job of its user.

    Stopped by: the devices controller or BPF program of the job's own cgroup.
    """
    go, both = gate_file(site.gpus, "go"), gate_file(site.gpus, "both")
    text = f"echo begun\n{waiting_for(both)}{site.probe}\necho over\n{waiting_for(go)}"
    jobs = [site.submit("--gres=gpu:1", text=text) for _ in range(2)]
    for job in jobs:
        wait_said(site.gpus, job, "begun")
    both.touch()
    owns = [site.own(job) for job in jobs]
    for job, own in zip_equal(jobs, owns):
        seen = opened(wait_said(site.gpus, job, "over"))
        assert seen == {"ENXIO": own | {"nvidiactl"}, "EPERM": EVERY - own}
    assert len(owns[0] | owns[1]) == 2
    go.touch()


def test_a_shared_card_is_open_to_each_job_with_a_place_until_its_own_end(
    slurm_gpus: Gpulock,
) -> None:
    """A whole job opens another card, and what a job leaves behind opens none any more."""
    counts = {"v100": COUNT, "share": 8}
    with confined_site(slurm_gpus, gres="count", counts=counts) as site:
        site.configure(SHARES="2:4 3:4", SLURM_COUNT="slurmctld", SLURM_GRES="gpu gpux")
        late, first, again, last = [gate_file(slurm_gpus, name) for name in ("late", "1", "2", "3")]
        begin, wait = f"{site.probe}\necho begun\n", waiting_for(last)
        stray = f"(setsid bash -c '({waiting_for(late).strip()}; {site.probe}; echo out) &' &)\n"
        one = site.submit("--gres=gpux:share:1", text=begin + stray + waiting_for(first))
        text = begin + waiting_for(again) + begin + wait
        two = site.submit("--gres=gpux:share:2", text=text)
        whole = site.submit("--gres=gpux:v100:1", text=begin + wait)
        words = ("-w", NODE, "--gres=gpux:share:1")
        other = site.slurm.submit("slbob", *words, script=begin + wait)
        for job in (one, two, whole, other):
            assert opened(wait_said(slurm_gpus, job, "begun")) == opens(site.own(job))
        assert site.own(one) == site.own(two)
        assert len(site.own(one) | site.own(whole) | site.own(other)) == 3
        card = site.own(one)
        first.touch()
        site.slurm.wait_done(one)
        wait_until(
            lambda: draining(slurm_gpus, one), why="the Epilog to leave its place to who is left"
        )
        late.touch()
        left = wait_said(slurm_gpus, one, "out").partition("begun")[2]
        assert opened(left) == opens(set())
        wait_until(lambda: reap(slurm_gpus, NODE) and not site.own(one), why="its place to be free")
        again.touch()
        wait_until(
            lambda: site.slurm.said(two).count("begun") == 2, why="the neighbour's second probe"
        )
        assert opened(site.slurm.said(two).partition("begun")[2]) == opens(card)
        last.touch()
        for job in (two, whole, other):
            assert site.slurm.wait_done(job) == "COMPLETED"
        assert site.left() == []
        assert slurm_gpus.locks(NODE) == {}


def draining(gpus: Gpulock, job: JobId) -> bool:
    """Return whether a job is over, and has a place that a process of it keeps."""
    return any(r.job_id == str(job) and r.draining for r in gpus.locks(NODE).values())


def opens(own: set[str]) -> dict[str, set[str]]:
    """Return what a probe finds that may open these GPUs alone."""
    return {"ENXIO": own | {"nvidiactl"}, "EPERM": set(EVERY - own)}


def test_a_step_without_a_script_opens_its_own_gpus_and_no_other(site: Site) -> None:
    done = site.slurm.srun("slalice", "-w", NODE, "--gres=gpu:3", *site.probe.split())
    seen = opened(done.stdout)
    assert (len(seen["ENXIO"]), len(seen["EPERM"])) == (3 + 1, COUNT - 3), done.stderr


def test_a_job_that_asked_for_no_gpu_opens_none(site: Site) -> None:
    job = site.submit(text=site.probe)
    site.slurm.wait_settled(job)
    assert opened(site.slurm.said(job)) == {"ENXIO": {"nvidiactl"}, "EPERM": EVERY}
    assert site.left() == []


def test_a_step_for_which_no_session_is_opened_does_not_start(site: Site) -> None:
    site.slurm.path_in(NODE, "/etc/pam.d/slurm").write_text(
        "account required pam_permit.so\nsession required pam_permit.so\n"
    )
    job = site.submit("--gres=gpu:1", text="echo ran\n")
    said = wait_said(site.gpus, job, "UsePAM=1")
    assert "ran" not in said.split()
    site.slurm.wait_state(job, "PENDING")  # by RequeueExit
    site.slurm.scancel(job)


def test_a_node_that_cannot_confine_is_drained_and_says_why(site: Site) -> None:
    site.configure(SYS_ROOT="/nonexistent")
    job = site.submit("--gres=gpu:1", text="echo ran\n")
    wait_until(lambda: site.slurm.is_out(NODE), why="the node to be drained")
    shown = site.slurm.scontrol("show", "node", NODE)
    assert "gpulock" in shown and "isolation" in shown.lower()
    never_ran(site, job)


def test_a_step_that_cannot_be_confined_does_not_start(site: Site) -> None:
    mark = site.slurm.path_in(NODE, f"/run/gpulock/{MARK}")
    if UNIFIED:  # which does not look at the nodes; slurmd is closed by now
        site.slurm.wait_done(site.submit(text="true\n"))
        mark.unlink()
        mark.mkdir()
    else:
        site.configure(DEV_ROOT="/dev/null")  # where the Prolog does not look
    job = site.submit("--gres=gpu:1", text="echo ran\n")
    wait_until(lambda: site.slurm.is_out(NODE), why="the node to be drained")
    never_ran(site, job)
    if UNIFIED:
        mark.rmdir()


def never_ran(site: Site, job: JobId) -> None:
    """Expect that nothing is left of a job that was put back into the queue."""
    site.slurm.wait_state(job, "PENDING")
    site.slurm.scancel(job)
    assert "ran" not in site.slurm.said(job).split()
    assert site.left() == []
    site.gpus.wait_free()


def test_what_a_killed_step_daemon_leaves_stays_confined_until_it_ends(site: Site) -> None:
    go, late = gate_file(site.gpus, "go"), gate_file(site.gpus, "late")
    text = f"echo begun\n{waiting_for(late)}{site.probe}\necho over\n{waiting_for(go)}"
    job = site.submit("--gres=gpu:1", text=text)
    wait_said(site.gpus, job, "begun")
    own = site.own(job)
    kill_steps(site.gpus, job, NODE)
    reap(site.gpus, NODE)
    assert len(site.service.jobs()) == len(TREES)
    late.touch()
    assert opened(wait_said(site.gpus, job, "over"))["EPERM"] == EVERY - own
    site.slurm.scancel(job)
    go.touch()
    wait_until(
        lambda: reap(site.gpus, NODE) and not site.left(), why="the reaper to remove the rest"
    )


def test_a_gpulockd_that_is_killed_and_comes_back_opens_nothing(site: Site) -> None:
    go = gate_file(site.gpus, "go")
    probes = [gate_file(site.gpus, name) for name in ("killed", "back")]
    parts = [f"{waiting_for(one)}{site.probe}\necho {one.name} over\n" for one in probes]
    text = "echo begun\n" + "".join(parts) + waiting_for(go)
    with daemon_on(site.gpus, NODE) as daemon:
        job = site.submit("--gres=gpu:1", text=text)
        wait_said(site.gpus, job, "begun")
        own = site.own(job)
        daemon.goes_round()
        daemon.crash()
        probes[0].touch()
        first = wait_said(site.gpus, job, "killed over")
        daemon.restart()
        daemon.goes_round()
        probes[1].touch()
        rest = wait_said(site.gpus, job, "back over").partition("killed over")[2]
        for part in (first, rest):
            assert opened(part) == {"ENXIO": own | {"nvidiactl"}, "EPERM": EVERY - own}
        go.touch()
        assert site.slurm.wait_done(job) == "COMPLETED"
    assert site.left() == []


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


def test_many_jobs_in_a_row_leave_nothing_behind(site: Site) -> None:
    before = modes(site.dev)
    for _ in range(ROWS):
        array = f"--array=1-{ROW // 2}%4"
        jobs = [site.submit(array, *asked, text="srun true\n") for asked in (["--gres=gpu:1"], [])]
        wait_empty(site.gpus)
        tasks = [task for job in jobs for task in site.slurm.tasks(job).values()]
        assert [site.slurm.state(task) for task in tasks] == ["COMPLETED"] * ROW
        assert site.left() == []
        assert modes(site.dev) == before
        assert site.gpus.locks(NODE) == {}
