# SPDX-License-Identifier: Apache-2.0
"""The prolog: what a job gets, and the exit code of each refusal."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time

import pytest

from gpulock.hooks.frame import HookRun
from gpulock.job import mps
from gpulock.sge import spool
from gpulock.store.event_kinds import REFUSED
from gpulock.store.event_log import read_events
from tests.support.jobs import SHEPHERD, Site, gpus, variables
from tests.support.locks import say_mps
from tests.support.packed_job import PER_JOB
from tests.support.trees import bus

RUN, QUEUE_ERROR, REQUEUE, JOB_ERROR = 0, 1, 99, 100


def test_a_job_gets_what_it_asked_for(
    site: Site, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, lines = site.run(gpus(2)), list[str]()
    monkeypatch.setattr(HookRun, "log", lambda _, line: lines.append(line))
    assert site.prolog(job) == RUN
    assert f": granted 0={bus(0)},1={bus(1)} in " in lines[-1]
    assert site.locks() == [bus(0), bus(1)]
    kept = site.node().store.read(bus(0)).owner
    assert kept is not None and kept.add_grp_id == 0  # a simulated job has its shepherd's
    assert kept.sid == site.node().proc.stat(SHEPHERD).session != 0
    found = variables(job.folder)
    assert found["CUDA_VISIBLE_DEVICES"] == found["SGE_GPU"] == "0,1"
    assert found["JOB_ID"] == "12"
    assert capfd.readouterr().out == ""
    assert stat.S_IMODE((job.folder / spool.RECORD).stat().st_mode) == 0o644


def test_a_node_of_one_model_without_shares_pays_for_no_kinds(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"gpulock.{name}" for name in ("alloc.kinds", "alloc.shares", "job.mps")]
    names += ["gpulock.node.kinds", "gpulock.node.shares"]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert site.prolog(site.run(gpus(2))) == RUN
    assert [name for name in names if name in sys.modules] == []


@pytest.mark.parametrize("count", [0, 1])
def test_a_job_submitted_from_one_with_a_share_does_not_use_its_mps(site: Site, count: int) -> None:
    brought = (
        ("CUDA_MPS_PIPE_DIRECTORY", f"{site.node().settings.mps_dir}/0000-8a-00.0/pipe"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25"),
        ("GPULOCK_SHARE", "1/4"),
    )
    job = site.run(gpus(count), variables=brought)
    assert site.prolog(job) == RUN
    assert not {name for name, _ in brought} & variables(job.folder).keys()


def test_a_job_that_asked_for_none_is_masked_and_locks_nothing(site: Site) -> None:
    job = site.run(variables=(("CUDA_VISIBLE_DEVICES", "0"), ("SGE_GPU", "0")))
    assert site.prolog(job) == RUN
    found = variables(job.folder)
    assert (found["CUDA_VISIBLE_DEVICES"], found["SGE_GPU"]) == ("", "")
    assert found["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert not site.lock.exists()


def test_a_prolog_shares_nothing_with_an_earlier_run_that_lives(site: Site) -> None:
    """Only a task of a parallel job may."""
    job = site.run(gpus(1))
    assert site.prolog(job) == RUN
    site.pid = SHEPHERD + 1
    site.proc.shepherd(site.pid, job.folder, uid=os.geteuid())
    assert site.prolog(job) == REQUEUE


@pytest.mark.parametrize(("key", "code"), [("requeue", REQUEUE), ("error", JOB_ERROR)])
def test_too_few_free_is_what_the_site_says(
    site: Site, key: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    site.prolog(site.run(gpus(3)))
    job = site.run(gpus(2), job_id=13, pid=501)
    assert site.prolog(job, ON_BUSY=key) == code
    told = capfd.readouterr().err
    assert told.startswith("gpulock: job 13: busy: ")
    assert told.count("\n") == 1 and "job 12" in told
    assert [*read_events(str(site.lock))][-1][1:] == (REFUSED, f"13 {told.rstrip()}")
    assert len(site.locks()) == 3


@pytest.mark.parametrize(("key", "code"), [("stop", QUEUE_ERROR), ("requeue", REQUEUE)])
@pytest.mark.parametrize("fault", ["driver", "expected", "lock_dir", "driver_set"])
def test_a_broken_node_is_what_the_site_says(site: Site, key: str, code: int, fault: str) -> None:
    job = site.run(gpus(2))
    keys = {"ON_BROKEN": key}
    if fault == "driver":
        shutil.rmtree(site.driver)
    elif fault == "expected":
        keys["EXPECTED_GPUS"] = "8"
        job = site.run(gpus(8), job_id=13)
    elif fault == "lock_dir":
        site.lock.mkdir()
        site.lock.chmod(0o777)
    else:
        keys["DRIVER_DIR"] = str(site.root)
    assert site.prolog(job, **keys) == code
    assert site.locks() == []


def test_gpus_asked_for_on_several_hosts_need_a_site_that_gives_them_there(site: Site) -> None:
    job = site.run(gpus(1), pe="mpi", hosts=(("node", 1), ("other", 1)))
    assert site.prolog(job) == JOB_ERROR
    assert site.prolog(job, SGE_SLAVE_TASKS="yes") == RUN
    once = gpus(1, consumable=PER_JOB)  # is this host's alone
    assert (
        site.prolog(site.run(once, job_id=13, pe="mpi", hosts=(("node", 2), ("other", 2)))) == RUN
    )
    assert site.locks() == [bus(0), bus(1)]
    assert site.prolog(site.run(gpus(1), job_id=14, pe="smp", hosts=(("node", 2),))) == RUN
    assert len(site.locks()) == 4


SHARES = {"SGE_COMPLEXES": "gpu gpu_share=share", "SHARES": "0:4", "SHARE_MPS": "yes"}


def test_a_job_with_a_share_starts_when_the_mps_of_its_card_runs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = site.run(gpus(1, "gpu_share"))
    waited = list[bool]()

    def start_mps(_: float) -> None:
        waited.append("CUDA_VISIBLE_DEVICES" in variables(job.folder))
        say_mps(site.node().store, f"{SHEPHERD} {site.node().proc.start(SHEPHERD)}")

    monkeypatch.setattr(time, "sleep", start_mps)
    assert site.prolog(job, **SHARES, VISIBLE_DEVICES="uuid") == RUN
    assert waited == [False]
    assert variables(job.folder)["CUDA_MPS_PIPE_DIRECTORY"].endswith("/pipe")


def test_a_job_whose_mps_does_not_come_goes_back_and_keeps_no_place(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mps, "READY_SECONDS", 0.0)
    job = site.run(gpus(1, "gpu_share"))
    assert site.prolog(job, **SHARES) == REQUEUE
    assert site.locks() == []
    assert "the MPS of this card is not ready" in capfd.readouterr().err
