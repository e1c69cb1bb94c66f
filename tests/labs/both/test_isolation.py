# SPDX-License-Identifier: Apache-2.0
"""The kernel keeps a job of either scheduler to its own GPUs; no daemon of gpulock's runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.labs.both.sge_site import SHARES, SgeSite
from tests.labs.both.site import Site
from tests.labs.common.confined_node import ConfinedNode
from tests.labs.common.device_nodes import modes, opened
from tests.labs.common.installed import SOAK
from tests.labs.containers import job as container_job
from tests.labs.containers.job import CDI, STARTS, WITH_DRIVER
from tests.support.pairs import zip_equal
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
ROWS: Final = 25 if SOAK else 1
ROW: Final = 20  # jobs, some of them at once


@pytest.fixture
def node(any_site: Site) -> Iterator[ConfinedNode]:
    """Let the site confine its jobs."""
    with any_site.confined() as made:
        yield made


def opens(site: Site, own: set[str]) -> dict[str, set[str]]:
    """Return what a probe finds that may open these GPUs alone."""
    closed = {f"nvidia{n}" for n in range(site.count)} - own
    return {"ENXIO": own | {"nvidiactl"}, "EPERM": closed}


@pytest.mark.attack
def test_two_jobs_of_one_user_cannot_open_each_others_gpu(
    any_site: Site, node: ConfinedNode
) -> None:
    """Tried: a job and a child that left its session open every GPU, beside another of its user.

    Stopped by: the devices controller or BPF program of the job's own cgroup.
    """
    both, until_both = any_site.waiting("both")
    go, until_go = any_site.waiting("go")
    child = f"(setsid sh -c '({node.probe}; echo over) &' &)\n"
    script = f"echo begun\n{until_both}{node.probe}\n{child}{until_go}"
    jobs = [any_site.submit(1, script) for _ in range(2)]
    for job in jobs:
        any_site.wait_said(job, "begun")
    both.touch()
    owns = [any_site.device_nodes(job) for job in jobs]
    for job, own in zip_equal(jobs, owns):
        assert opened(any_site.wait_said(job, "over")) == opens(any_site, own)
    assert len(owns[0] | owns[1]) == 2
    go.touch()


def test_a_job_that_asked_for_no_gpu_opens_none(any_site: Site, node: ConfinedNode) -> None:
    job = any_site.submit(0, node.probe)
    any_site.wait_over(job)
    assert opened(any_site.said(job)) == opens(any_site, set())
    assert node.left() == []


def test_a_job_opens_its_own_gpus_and_no_other_from_any_container(
    any_site: Site, node: ConfinedNode
) -> None:
    gpus = any_site.gpus
    machine, settings = gpus.cluster.machines[any_site.node], gpus.node(any_site.node).settings
    go, until_go = any_site.waiting("go")
    boxes = container_job.Boxes(machine, settings)
    with container_job.fitted(machine, node.dev):
        node.configure(LEFTOVER_PROCESSES="kill", **boxes.keys)
        any_site.command("reap")  # it writes the CDI spec
        script = f"echo mine=$CUDA_VISIBLE_DEVICES\n{boxes.script()}{until_go}"
        job = any_site.submit(2, script)
        said = any_site.wait_said(job, "\nout\n")
        own = any_site.device_nodes(job)
        go.touch()
        any_site.wait_over(job)
        # podman leaves a process of its own behind: its cgroup may be the reaper's
        wait_until(lambda: any_site.reap() and not node.left(), why="nothing to be left")
    assert any_site.locks() == {}
    boxed = container_job.seen(said)
    assert {one.mask for one in boxed.values()} == {said.partition("mine=")[2].split()[0]}
    assert {name for name, one in boxed.items() if one.driver == boxes.version} == WITH_DRIVER
    assert len(own) == 2
    every = {name: opens(any_site, own) for name in STARTS}
    mine = {"ENXIO": own | {"nvidiactl"}}
    assert {name: one.opens for name, one in boxed.items()} == {**every, CDI: mine}


def test_what_killed_supervisors_leave_stays_confined_until_it_ends(
    any_site: Site, node: ConfinedNode
) -> None:
    late, until_late = any_site.waiting("late")
    go, until_go = any_site.waiting("go")
    job = any_site.start(1, f"{until_late}{node.probe}\necho over\n{until_go}")
    own = any_site.device_nodes(job)
    any_site.kill_supervisors(job)
    any_site.reap()
    assert len(node.service.jobs()) == 1
    late.touch()
    assert opened(any_site.wait_said(job, "over")) == opens(any_site, own)
    any_site.cancel(job)
    go.touch()
    wait_until(lambda: any_site.reap() and not node.left(), why="the reaper to remove the rest")


def test_many_jobs_in_a_row_leave_nothing_behind(any_site: Site, node: ConfinedNode) -> None:
    before = modes(node.dev)
    for _ in range(ROWS):
        ended = any_site.gpus.cluster.lab / "ended"
        ended.write_text("")
        ended.chmod(0o666)
        for gpus in (1, 0):
            any_site.submit(gpus, f"echo one >>{ended}\n", tasks=ROW // 2)
        any_site.wait_empty()
        assert ended.read_text().count("one") == ROW
        assert node.left() == []
        assert modes(node.dev) == before
        # where processes come and go all the time a release may leave a lock to the reaper
        left = any_site.gpus.locks(any_site.node)
        assert all(record.draining for record in left.values())
        assert any_site.reap().acts() == [("freed", "dead")] * len(left)
        assert any_site.locks() == {}


@pytest.mark.sge
def test_a_shared_card_is_open_to_each_job_with_a_place_until_its_own_end(
    sge_site: SgeSite,
) -> None:
    """A whole job opens another card, and what a job leaves behind opens none any more."""
    site = sge_site
    late, until_late = site.waiting("late")
    (first, until_first), (again, until_again), (last, until_last) = map(site.waiting, "123")
    with site.confined(range(site.count)[-2:]) as node:
        begin = f"{node.probe}\necho begun\n"
        stray = f"(setsid bash -c '({until_late.strip()}; {node.probe}; echo out) &' &)\n"
        one = site.submit(1, begin + stray + until_first, kind=SHARES)
        two = site.submit(2, begin + until_again + begin + until_last, kind=SHARES)
        whole = site.submit(1, begin + until_last)
        other = site.submit(1, begin + until_last, user=site.bob, kind=SHARES)
        for job in (one, two, whole, other):
            said = site.wait_said(job, "begun")
            assert opened(said) == opens(site, site.device_nodes(job))
        assert site.device_nodes(one) == site.device_nodes(two)
        cards = [site.device_nodes(job) for job in (one, whole, other)]
        assert len(set[str]().union(*cards)) == 3
        first.touch()
        site.wait_over(one)
        assert len(site.held(one)) == 1  # of the process that is left
        late.touch()
        assert opened(site.wait_said(one, "out").partition("begun")[2]) == opens(site, set())
        wait_until(lambda: site.reap() and not site.held(one), why="its place to be free")
        again.touch()
        wait_until(lambda: site.said(two).count("begun") == 2, why="the neighbour's second probe")
        assert opened(site.said(two).partition("begun")[2]) == opens(site, cards[0])
        last.touch()
        for job in (two, whole, other):
            site.wait_over(job)
        wait_until(lambda: site.reap() and not node.left(), why="nothing to be left")
        assert site.locks() == {}
