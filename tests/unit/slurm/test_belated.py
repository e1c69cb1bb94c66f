# SPDX-License-Identifier: Apache-2.0
"""Hooks that a killed slurmd left behind come late: they harm no later run of their job."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.deadline import Deadline
from gpulock.node.procfs import TICKS, Proc
from gpulock.slurm import epilog
from tests.support.clock import VirtualClock
from tests.support.faults import rename_host
from tests.support.slurm_site import RUN, Site, row
from tests.support.trees import FakeProc, bus

FIRST, SECOND = {"SLURM_JOB_RESTART_COUNT": "0"}, {"SLURM_JOB_RESTART_COUNT": "1"}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, SLURM_WAIT="0.01")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.mark.parametrize("selection", ["slurm", "gpulock"])
def test_the_prolog_of_an_earlier_run_takes_nothing_and_says_nothing_to_its_tasks(
    site: Site, selection: str
) -> None:
    site.set(SLURM_DEVICE_SELECTION=selection)
    site.answers(row(12, RestartCnt="1"))
    site.prolog(12, **SECOND, SLURM_JOB_NUM_NODES="2")
    before = site.locks(), site.note().token
    assert site.prolog(12, **FIRST, SLURM_JOB_NUM_NODES="2") == RUN
    assert (site.locks(), site.note().token) == before
    assert site.note().refused == ""
    assert [call for call in site.calls() if call[0] in ("scontrol", "scancel")] == []


def test_a_host_name_that_changed_since_the_prolog_keeps_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.prolog(12)
    rename_host(monkeypatch, "gpu01.cluster.example")
    site.epilog(12)
    assert (site.locks(), site.notes()) == ([], [])


def test_the_epilog_of_an_earlier_run_frees_what_was_claimed_before_it_began(
    site: Site, clock: VirtualClock
) -> None:
    begun = clock()
    clock.now += 1
    site.prolog(12, **SECOND)
    node = site.node()
    late = epilog.release_slurm_job(node, site.call(12, **SECOND), Deadline(5), begun)
    assert (late.freed, site.locks()) == ([], [bus(0), bus(1)])
    assert site.note().devices != []
    own = epilog.release_slurm_job(node, site.call(12, **SECOND), Deadline(5), clock())
    assert (own.freed, site.locks()) == ([bus(0), bus(1)], [])


@pytest.mark.parametrize(("claimed", "freed"), [(100.0006, [bus(0)]), (100.0008, [])])
def test_a_claim_that_follows_within_a_millisecond_is_a_later_one(
    site: Site, claimed: float, freed: list[str]
) -> None:
    site.hold(0, job_id="12", claimed_boottime=claimed)
    late = epilog.release_slurm_job(site.node(), site.call(12), Deadline(5), 100.0007)
    assert late.freed == freed


def test_an_epilog_began_with_the_leader_of_its_group(proc: FakeProc) -> None:
    proc.add(60, name="site-epilog", ppid=1, start=1000)
    assert epilog.epilog_launch_time(Proc(str(proc.root)), 60) == 1001 / TICKS


def test_an_epilog_of_a_group_whose_leader_is_gone_began_before_every_claim(proc: FakeProc) -> None:
    assert epilog.epilog_launch_time(Proc(str(proc.root)), 60) == 0.0
