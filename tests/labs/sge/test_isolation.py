# SPDX-License-Identifier: Apache-2.0
"""The kernel keeps a job of a real Grid Engine to its own GPUs; no daemon of gpulock's runs."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.labs.common.device_nodes import (
    PROBE,
    Service,
    make_nodes,
    modes,
    opened,
    programs,
)
from tests.labs.common.report_node import observed
from tests.labs.containers import job as container_job
from tests.labs.containers.job import CDI, STARTS, WITH_DRIVER, Boxes
from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.isolation.test_isolation_kernel import inside
from tests.labs.sge import jobs
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.install import INSTALLATION
from tests.labs.sge.jobs import gate_file, held, on, reap, said, wait_said, waiting_for
from tests.labs.sge.lab import JobId
from tests.labs.sge.test_ends import kill_shepherd
from tests.labs.sge.test_parallel import MPI, until_wrapped
from tests.support.pairs import zip_equal
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE = NODES[0]
ALL = {f"nvidia{n}" for n in range(GPUS)}
BURNT = 3  # seconds of a processor
BURN = f"import time\nwhile time.process_time() < {BURNT}:\n    pass\n"
ROWS = 25 if jobs.SOAK else 1
ROW = 20  # jobs, some of them at once


class Site:
    """A node that confines its jobs, with device nodes that have no driver."""

    def __init__(self, gpus: Gpulock, service: Service, dev: Path) -> None:
        self.gpus = gpus
        self.service = service
        self.dev = dev
        self.programs = programs()
        self.probe = f"/usr/bin/python3 -IS {jobs.script(gpus, 'probe.py', PROBE)} {dev}\n"

    def configure(self, **changes: str) -> None:
        """Write the node's settings."""
        keys = {"SYS_ROOT": "/sys", "DEV_ROOT": str(self.dev), **changes}
        self.gpus.configure(NODE, ISOLATION="cgroup", **keys)

    def submit(self, *asked: str, script: str) -> JobId:
        """Submit a job of glalice to the node."""
        return self.gpus.sge.submit("glalice", *on(NODE, *asked), stdin=script)

    def own(self, job: JobId) -> set[str]:
        """Return the names of the nodes of a job's devices."""
        return {
            f"nvidia{record.minor}"
            for record in self.gpus.locks(NODE).values()
            if record.job_id == str(job)
        }

    def left(self) -> list[str]:
        """Return what isolation has left behind; programs go with their cgroups."""
        if jobs := self.service.jobs():
            return jobs
        return [f"program {number}" for number in programs() - self.programs]

    def nothing_left(self) -> bool:
        """Return whether nothing is left, when the reaper has been there as well.

        A process of podman's that ends while the epilog runs leaves the job's cgroup to the reaper:
        one that opens no GPU any more.
        """
        for place in self.service.places():
            assert inside([str(place)], self.dev) == {"ENXIO": {"nvidiactl"}, "EPERM": ALL}
        return not self.left() or not (reap(self.gpus, NODE) and self.left())


@contextmanager
def isolated(gpus: Gpulock) -> Generator[Site]:
    """Have a node confine its jobs for a while."""
    dev = gpus.sge.lab / "dev"
    make_nodes(dev, GPUS)
    try:
        service = Service("gpulock-lab-execd.service", gpus.sge.execd_pid(NODE))
        try:
            made = Site(gpus, service, dev)
            made.configure()
            yield made
            gpus.sge.clear_jobs()
        finally:
            service.close()
    finally:
        shutil.rmtree(dev)


@pytest.fixture
def site(gpus: Gpulock) -> Iterator[Site]:
    with isolated(gpus) as made:
        yield made


def test_a_job_opens_its_own_gpus_and_no_other(site: Site) -> None:
    go = gate_file(site.gpus, "go")
    child = f"(setsid sh -c '(sleep 0.3; echo child; {site.probe.strip()}; echo over) &' &)\n"
    job = site.submit("-l", "gpu=2", script=site.probe + "id -u\n" + child + waiting_for(go))
    first, _, second = wait_said(site.gpus, job, "over").partition("child\n")
    own = site.own(job)
    assert len(own) == 2
    for text in (first, second):
        assert opened(text) == {"ENXIO": own | {"nvidiactl"}, "EPERM": ALL - own}
    assert str(site.gpus.sge.users["glalice"].uid) in first.splitlines()
    shepherd = site.gpus.sge.shepherd_pid(job)
    assert [place.parent for place in site.service.of(shepherd)] == site.service.folders
    wait_until(lambda: not site.service.strays(), why="the child to end")
    go.touch()
    site.gpus.sge.wait_settled(job)
    assert site.left() == []
    assert site.gpus.locks(NODE) == {}


@pytest.mark.attack
def test_two_jobs_of_one_user_cannot_open_each_others_gpu(site: Site) -> None:
    """Tried: a job opens every GPU, beside another job of its user.

    Stopped by: the devices controller or BPF program of the job's own cgroup.
    """
    go = gate_file(site.gpus, "go")
    both = gate_file(site.gpus, "both")
    script = waiting_for(both) + site.probe + "echo over\n" + waiting_for(go)
    jobs = [site.submit("-l", "gpu=1", script=script) for _ in range(2)]
    for job in jobs:
        site.gpus.sge.wait_running(job)
    both.touch()
    owns = [site.own(job) for job in jobs]
    for job, own in zip_equal(jobs, owns):
        seen = opened(wait_said(site.gpus, job, "over"))
        assert seen == {"ENXIO": own | {"nvidiactl"}, "EPERM": ALL - own}
    assert len(owns[0] | owns[1]) == 2
    go.touch()


def test_a_command_of_qrsh_opens_its_own_gpus_and_no_other(site: Site) -> None:
    """Without shepherd_cmd any prolog breaks a terminal of 8.1.9, and the lack of one elsewhere."""
    words = [] if INSTALLATION.is_ocs else ["-pty", "no"]
    asked = (*words, "-q", "gpu.q", "-l", f"h={NODE},gpu=3")
    done = site.gpus.sge.qrsh("glalice", *asked, *site.probe.split())
    seen = opened(done.stdout)
    assert (len(seen["ENXIO"]), len(seen["EPERM"])) == (3 + 1, GPUS - 3), done.stderr


def test_a_job_that_asked_for_no_gpu_opens_none(site: Site) -> None:
    job = site.submit(script=site.probe)
    site.gpus.sge.wait_settled(job)
    assert opened(said(site.gpus, job)) == {"ENXIO": {"nvidiactl"}, "EPERM": ALL}
    assert site.left() == []


def test_the_mask_holds_uuids(site: Site) -> None:
    job = site.submit("-l", "gpu=1", script="echo CVD=$CUDA_VISIBLE_DEVICES\n")
    site.gpus.sge.wait_settled(job)
    assert "CVD=GPU-" in said(site.gpus, job)


def test_a_node_that_cannot_confine_starts_no_job(site: Site) -> None:
    empty = site.gpus.sge.lab / "no-cgroups"
    empty.mkdir(exist_ok=True)
    site.configure(SYS_ROOT=str(empty))
    job = site.submit("-l", "gpu=1", script="echo ran\n")
    jobs.wait_refused(site.gpus, NODE, job)
    site.gpus.sge.clear_queue_errors()
    assert "cgroup version 2" in said(site.gpus, job)
    assert "ran" not in said(site.gpus, job).split()
    assert held(site.gpus, NODE, job) == []


@pytest.fixture
def boxes(site: Site) -> Iterator[Boxes]:
    """Let jobs on the node start containers."""
    machine = site.gpus.sge.machines[NODE]
    with container_job.fitted(machine, site.dev, site.gpus.node(NODE).settings) as fitted:
        yield fitted


def test_a_job_opens_its_own_gpus_and_no_other_from_any_container(site: Site, boxes: Boxes) -> None:
    site.configure(LEFTOVER_PROCESSES="kill", **boxes.keys)
    jobs.command(site.gpus, NODE, "cdi", "--write")
    go = gate_file(site.gpus, "go")
    script = f"echo mine=$CUDA_VISIBLE_DEVICES\n{boxes.script()}{waiting_for(go)}"
    job = site.submit("-l", "gpu=2", script=script)
    text = wait_said(site.gpus, job, "\nout\n")
    own = site.own(job)
    go.touch()
    site.gpus.sge.wait_done(job)
    boxed = container_job.seen(text)
    assert {one.mask for one in boxed.values()} == {text.partition("mine=")[2].split()[0]}
    assert {name for name, one in boxed.items() if one.driver == boxes.version} == WITH_DRIVER
    wait_until(site.nothing_left, why="nothing to be left")  # of podman's own process neither
    assert site.gpus.locks(NODE) == {}
    assert len(own) == 2
    mine = {"ENXIO": own | {"nvidiactl"}}
    every = {name: {**mine, "EPERM": ALL - own} for name in STARTS}
    assert {name: one.opens for name, one in boxed.items()} == {**every, CDI: mine}


def test_what_a_killed_shepherd_leaves_stays_confined_until_it_ends(site: Site) -> None:
    go = gate_file(site.gpus, "go")
    late = gate_file(site.gpus, "late")
    script = waiting_for(late) + site.probe + "echo over\n" + waiting_for(go)
    job = site.submit("-l", "gpu=1", script=script)
    site.gpus.sge.wait_running(job)
    own = site.own(job)
    kill_shepherd(site.gpus, NODE, job)
    reap(site.gpus, NODE)
    assert len(site.service.jobs()) == 2
    late.touch()
    assert opened(wait_said(site.gpus, job, "over"))["EPERM"] == ALL - own
    go.touch()
    wait_until(
        lambda: reap(site.gpus, NODE) and not site.left(), why="the reaper to remove the rest"
    )


def test_a_gpulockd_that_is_killed_and_comes_back_opens_nothing(site: Site) -> None:
    go = gate_file(site.gpus, "go")
    probes = [gate_file(site.gpus, name) for name in ("killed", "back")]
    script = "".join(f"{waiting_for(one)}{site.probe}echo {one.name} over\n" for one in probes)
    with daemon_on(site.gpus, NODE) as daemon:
        job = site.submit("-l", "gpu=1", script=script + waiting_for(go))
        site.gpus.sge.wait_running(job)
        own = site.own(job)
        daemon.goes_round()
        daemon.crash()
        probes[0].touch()
        first = wait_said(site.gpus, job, "killed over")
        daemon.restart()
        daemon.goes_round()
        probes[1].touch()
        rest = wait_said(site.gpus, job, "back over").partition("killed over")[2]
        for text in (first, rest):
            assert opened(text) == {"ENXIO": own | {"nvidiactl"}, "EPERM": ALL - own}
        go.touch()
        site.gpus.sge.wait_done(job)
    assert site.left() == []


def row(site: Site, *asked: str) -> JobId:
    """Submit half a row of jobs."""
    return site.submit("-t", f"1-{ROW // 2}", "-tc", "4", *asked, script="true\n")


def wait_row(site: Site, job: JobId) -> None:
    """Wait until every job of half a row has ended well."""
    site.gpus.sge.wait_done(job)
    wait_until(lambda: len(jobs.records(site.gpus, job)) == ROW // 2, why="a row in accounting")
    ends = {(one["failed"], one["exit_status"]) for one in jobs.records(site.gpus, job)}
    assert ends == {("0", "0")}


def test_many_jobs_in_a_row_leave_nothing_behind(site: Site) -> None:
    before = modes(site.dev)
    for _ in range(ROWS):
        for job in (row(site, "-l", "gpu=1"), row(site)):
            wait_row(site, job)
        assert site.left() == []
        assert modes(site.dev) == before
        # where processes come and go all the time a release may leave a lock to the reaper
        left = site.gpus.locks(NODE)
        assert all(record.draining for record in left.values())
        assert reap(site.gpus, NODE).acts() == [("freed", "dead")] * len(left)
        assert site.gpus.locks(NODE) == {}


@pytest.fixture
def sharing(gpus: Gpulock) -> Iterator[Gpulock]:
    """Let NODE count places, and its execd leave daemonised children of a job alone."""
    gpus.sge.set_complex("gpu_share gpu_share INT <= YES YES 0 0")
    gpus.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16,gpu_share=8")
    jobs.restart_execd(gpus, NODE, execd_params="ENABLE_ADDGRP_KILL=false")
    yield gpus
    gpus.sge.clear_jobs()
    gpus.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16")
    jobs.forget_conf(gpus, NODE, "execd_params")


def test_a_shared_card_is_open_to_each_job_with_a_place_until_its_own_end(
    sharing: Gpulock, site: Site
) -> None:
    """A whole job opens another card, and what a job leaves behind opens none any more."""
    site.configure(SGE_COMPLEXES="gpu gpuj gpu_share=share", SHARES="6:4 7:4")
    late, first, again, last = [gate_file(sharing, name) for name in ("late", "1", "2", "3")]
    begin, wait = f"{site.probe}echo begun\n", waiting_for(last)
    stray = f"(setsid sh -c '({waiting_for(late).strip()}; {site.probe.strip()}; echo out) &' &)\n"
    one = site.submit("-l", "gpu_share=1", script=begin + stray + waiting_for(first))
    two = site.submit("-l", "gpu_share=2", script=begin + waiting_for(again) + begin + wait)
    whole = site.submit("-l", "gpu=1", script=begin + wait)
    words = on(NODE, "-l", "gpu_share=1")
    other = sharing.sge.submit("glbob", *words, stdin=begin + wait)
    for user, job in (("glalice", one), ("glalice", two), ("glalice", whole), ("glbob", other)):
        assert opened(wait_said(sharing, job, "begun", user=user)) == opens(site.own(job))
    assert site.own(one) == site.own(two)
    assert len(site.own(one) | site.own(whole) | site.own(other)) == 3
    card, gid = site.own(one), jobs.group_of(sharing, NODE, one)
    first.touch()
    sharing.sge.wait_settled(one)
    assert len(held(sharing, NODE, one)) == 1  # of the process that is left
    late.touch()
    left = wait_said(sharing, one, "out").partition("begun")[2]
    assert opened(left) == opens(set())
    jobs.end_carriers(gid)
    assert reap(sharing, NODE).acts().count(("freed", "dead")) == 1
    again.touch()
    wait_until(lambda: said(sharing, two).count("begun") == 2, why="the neighbour's second probe")
    assert opened(said(sharing, two).partition("begun")[2]) == opens(card)
    last.touch()
    for job in (two, whole, other):
        sharing.sge.wait_done(job)
    wait_until(site.nothing_left, why="nothing to be left")
    assert sharing.locks(NODE) == {}


def opens(own: set[str]) -> dict[str, set[str]]:
    """Return what a probe finds that may open these GPUs alone."""
    return {"ENXIO": own | {"nvidiactl"}, "EPERM": ALL - own}


@pytest.mark.attack
@pytest.mark.parametrize("slots", [("mpi", "6"), ("smp", "2")])
def test_a_parallel_job_whose_tasks_nothing_confines_does_not_start(
    site: Site, slots: tuple[str, str]
) -> None:
    """Tried: a parallel job, whose tasks execd starts outside of the job's cgroup.

    Stopped by: without shepherd_cmd such a job is refused.
    """
    without = ("-j", "y", "-q", "gpu.q", "-masterq", f"gpu.q@{NODE}", "-pe", *slots)
    job = site.gpus.sge.submit("glalice", *without, stdin="echo started\n")
    site.gpus.sge.wait_state(job, "Eqw")
    text = wait_said(site.gpus, job, "nothing would keep its tasks")
    assert "started" not in text
    assert site.left() == []
    site.gpus.sge.qdel(str(job))


@pytest.fixture
def parallel(site: Site) -> Iterator[Site]:
    """Let slave tasks of parallel jobs be confined on the node, and have GPUs on every one."""
    gpus = site.gpus
    for node in NODES[1:]:
        gpus.configure(node, SGE_SLAVE_TASKS="yes")
    site.configure(SGE_SLAVE_TASKS="yes")
    for node in NODES:
        shepherd = gpus.hooks.folder / "prolog/sge_shepherd"
        gpus.sge.set_conf("shepherd_cmd", str(shepherd), host=node)
    until_wrapped(gpus)
    yield site
    gpus.sge.clear_jobs()
    for node in NODES:
        gpus.sge.set_conf("shepherd_cmd", "none", host=node)


@pytest.mark.attack
def test_a_task_of_a_job_of_one_host_opens_what_the_job_holds(parallel: Site) -> None:
    """Tried: `qrsh -inherit` to the job's own host: execd starts that shepherd outside of the job.

    Stopped by: `sge_shepherd` confines the task to what its job holds.
    """
    ask = f"qrsh -inherit {NODE} '{parallel.probe.strip()}'\necho over\n"
    job = parallel.submit("-pe", "smp", "2", "-l", "gpuj=1", script=ask)
    seen = opened(wait_said(parallel.gpus, job, "over"))

    assert {name for name in seen["ENXIO"] if name != "nvidiactl"} < ALL
    assert len(seen["ENXIO"]) == 2
    assert seen["EPERM"] == ALL - seen["ENXIO"]


def test_a_confined_jobs_record_has_the_processor_time_that_its_cgroup_counted(
    site: Site,
) -> None:
    burn = jobs.script(site.gpus, "burn.py", BURN)
    folder = site.gpus.sge.lab / "report" / NODE
    with observed(site.gpus, NODE, folder, site.configure):
        job = site.submit("-l", "gpu=1", script=f"/usr/bin/python3 -IS {burn}\nsleep 3\n")
        site.gpus.sge.wait_settled(job)
        assert "of processor time" in said(site.gpus, job)
        jobs.command(site.gpus, NODE, "reap")
        told = jobs.command(site.gpus, NODE, "report", str(job), "--json")
        (found,) = json.loads(told)["claims"]
        assert BURNT <= found["cpu_seconds"] <= BURNT + 2
        assert found["host_memory_peak_bytes"] is None, "execd is in the cgroup above"
        listed = jobs.command(site.gpus, NODE, "history", "--job", str(job), "--csv")
        (row,) = csv.DictReader(io.StringIO(listed))
        assert row["cpu_seconds"] == str(found["cpu_seconds"])
        assert row["host_memory_peak_bytes"] == ""


def test_a_slave_task_opens_what_its_job_holds_on_its_own_host(parallel: Site) -> None:
    go = gate_file(parallel.gpus, "go")
    ask = f"qrsh -inherit {NODE} '{parallel.probe.strip()}'\necho over\n{waiting_for(go)}"
    job = parallel.gpus.sge.submit("glalice", "-j", "y", *MPI, stdin=ask)
    without = ("-j", "y", "-q", "gpu.q", "-pe", "mpi", "6")
    other = parallel.gpus.sge.submit("glalice", *without, stdin=ask)
    seen = opened(wait_said(parallel.gpus, job, "over"))
    none = opened(wait_said(parallel.gpus, other, "over"))
    own = parallel.own(job)
    assert len(own) == 2
    assert seen == {"ENXIO": own | {"nvidiactl"}, "EPERM": ALL - own}
    assert none == {"ENXIO": {"nvidiactl"}, "EPERM": ALL}
    go.touch()
    for ended in (job, other):
        parallel.gpus.sge.wait_done(ended)

    def nothing_left() -> bool:
        reap(parallel.gpus, NODE)
        return not parallel.left()

    wait_until(nothing_left, why="the reaper to remove what tasks have left")
