# SPDX-License-Identifier: Apache-2.0
"""Slave tasks: the first of a job on a host claims, others share, a refused one sees nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, Refusal
from gpulock.sge import claim, slave, spool
from gpulock.store import grants, owner
from tests.support.execd import SpooledJob
from tests.support.faults import raising
from tests.support.jobs import Site, child_of, gpus, variables
from tests.support.packed_job import JOB, PER_JOB, Ask, Grant, ResourceRequest, ocs_job
from tests.support.trees import bus

HOSTS = (("node", 2), ("other", 2))
FIRST, SECOND = 600, 601


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    child_of(monkeypatch, made)
    monkeypatch.setattr(os, "setresuid", lambda *_: None)  # pyright: ignore
    return made


def parallel(site: Site, asked: ResourceRequest) -> SpooledJob:
    return site.spool(asked, pe="mpi", hosts=HOSTS)


def start(site: Site, pid: int, **keys: str) -> int:
    return slave.main(["slave", str(pid)], {}, site.config(SGE_SLAVE_TASKS="yes", **keys))


def test_the_first_task_claims_for_the_slots_here_and_the_next_shares(site: Site) -> None:
    """Each keeps a record of its own, for an adoption; the history is owed one line."""
    job = parallel(site, gpus(1))
    folders = [site.task(job, FIRST), site.task(job, SECOND, "2.node")]
    assert (start(site, FIRST), start(site, SECOND)) == (0, 0)
    assert site.locks() == [bus(0), bus(1)]
    assert [variables(one)["CUDA_VISIBLE_DEVICES"] for one in folders] == ["0,1", "0,1"]
    kept = [owner.parse_owner((folder / spool.RECORD).read_text()) for folder in folders]
    assert [one.pid for one in kept] == [FIRST, SECOND]
    assert [one.token for one in kept] == os.listdir(site.state / grants.OWED) * 2


def test_a_per_job_request_is_the_master_hosts_alone(site: Site) -> None:
    job = parallel(site, gpus(1, consumable=PER_JOB))
    folder = site.task(job, FIRST)
    assert start(site, FIRST) == 0
    assert variables(folder)["CUDA_VISIBLE_DEVICES"] == ""


def test_what_another_job_holds_there_is_no_grant_of_the_tasks_job(site: Site) -> None:
    other = site.run(gpus(1), job_id=99, pid=599)
    assert site.prolog(other) == 0
    job = parallel(site, gpus(1))
    folder = site.task(job, FIRST, home=True)
    assert start(site, FIRST) == 0
    found = variables(folder)
    assert (found["CUDA_VISIBLE_DEVICES"], site.locks()) == ("", [bus(0)])
    assert "master host" in found[slave.REFUSED]


def test_on_the_master_host_a_task_shares_what_was_asked_for_once_a_job(site: Site) -> None:
    other = site.run(gpus(1), job_id=99, pid=599)
    assert site.prolog(other) == 0
    job = site.run(gpus(1, consumable=PER_JOB), pe="mpi", hosts=HOSTS)
    site.settings["SGE_SLAVE_TASKS"] = "yes"
    assert site.prolog(job) == 0
    folder = site.task(job, FIRST, home=True)
    assert start(site, FIRST) == 0
    assert variables(folder)["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_refused_task_may_start_sees_nothing_and_knows_why(site: Site) -> None:
    job = site.spool(gpus(9), pe="mpi", hosts=HOSTS, variables=((slave.REFUSED, "no"),))
    folder = site.task(job, FIRST)
    assert start(site, FIRST) == 0
    found = variables(folder)
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert found[slave.REFUSED].startswith("gpulock: job 12.1")


@pytest.mark.parametrize("fault", ["file", "environment"])
def test_a_task_that_cannot_even_be_masked_does_not_start(site: Site, fault: str) -> None:
    job = parallel(site, gpus(1))
    folder = site.task(job, FIRST)
    (folder / "environment").unlink()
    if fault == "file":
        job.job_file.unlink()
    assert start(site, FIRST) == 1


def test_a_task_that_cannot_be_told_keeps_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = parallel(site, gpus(1))
    site.task(job, FIRST)
    monkeypatch.setattr(
        claim, "write_spool_record", raising(Refusal(BROKEN, "no space", "make some"))
    )
    assert start(site, FIRST) == 0
    assert site.locks() == []


def test_a_task_is_left_alone_where_the_site_gives_tasks_nothing(site: Site) -> None:
    job = parallel(site, gpus(1))
    folder = site.task(job, FIRST)
    before = (folder / "environment").read_bytes()
    assert slave.main(["slave", str(FIRST)], {}, site.config()) == 0
    assert (folder / "environment").read_bytes() == before


def test_a_task_on_the_jobs_own_host_is_the_jobs_though_the_site_gives_others_nothing(
    site: Site,
) -> None:
    """It saw every GPU, and what it left behind kept no lock: its group was not the job's."""
    job = site.run(gpus(1), pe="smp", hosts=(("node", 2),))
    assert site.prolog(job) == 0
    folder = site.task(job, FIRST, home=True)
    assert slave.main(["slave", str(FIRST)], {}, site.config()) == 0
    assert variables(folder)["CUDA_VISIBLE_DEVICES"] == "0,1"
    lock = site.node().store.read_detailed_locks()[bus(0)]
    assert [pid for pid, *_ in lock.anchors] == [FIRST]


def test_without_a_shepherd_or_settings_the_task_does_not_start(site: Site) -> None:
    assert start(site, 999) == 1
    assert slave.main(["slave", "999"], {}, str(site.root / "gone")) == 1


@pytest.mark.parametrize(("host", "locks"), [("node", [bus(0)]), ("other", [])])
def test_a_task_has_what_its_own_host_granted(site: Site, host: str, locks: list[str]) -> None:
    """Open Cluster Scheduler says which: a per-job complex need not be the master host's."""
    job = site.spool(gpus(1), pe="mpi", hosts=HOSTS, owner="alice")
    job.job_file.write_bytes(ocs_job((Ask("gpu", 1, JOB),), (Grant("gpu", 1, host),)))
    site.task(job, FIRST)
    assert start(site, FIRST) == 0
    assert site.locks() == locks
