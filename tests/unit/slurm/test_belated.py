# SPDX-License-Identifier: Apache-2.0
"""Hooks that a killed slurmd left behind come late: they harm no later run of their job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.alloc.release import ReleaseResult
from gpulock.hooks.frame import HookRun
from gpulock.node.procfs import TICKS, Proc
from gpulock.slurm import epilog
from tests.support.clock import VirtualClock
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
    site: Site, selection: str, capfd: pytest.CaptureFixture[str]
) -> None:
    site.set(SLURM_DEVICE_SELECTION=selection)
    site.answers(row(12, RestartCnt="1"))
    site.prolog(12, **SECOND, SLURM_JOB_NUM_NODES="2")
    before = site.locks(), site.note().token
    assert site.prolog(12, **FIRST, SLURM_JOB_NUM_NODES="2") == RUN
    assert (site.locks(), site.note().token) == before
    assert site.note().refused == ""
    assert [call for call in site.calls() if call[0] in ("scontrol", "scancel")] == []
    assert "later run" in capfd.readouterr().err


def release(site: Site, begun: float, **told: str) -> ReleaseResult:
    """Release job 12 by an Epilog that began then."""
    run = HookRun()
    run.begun = begun
    return epilog.release_slurm_job(site.node(), site.call(12, **told), run)


def test_the_epilog_of_an_earlier_run_frees_what_was_claimed_before_it_began(
    site: Site, clock: VirtualClock
) -> None:
    begun = clock()
    clock.now += 1
    site.prolog(12, **SECOND)
    late = release(site, begun, **SECOND)
    assert (late.freed, site.locks()) == ([], [bus(0), bus(1)])
    assert site.note().devices != []
    own = release(site, clock(), **SECOND)
    assert (own.freed, site.locks()) == ([bus(0), bus(1)], [])


@pytest.mark.parametrize(("claimed", "freed"), [(100.0006, [bus(0)]), (100.0008, [])])
def test_a_claim_that_follows_within_a_millisecond_is_a_later_one(
    site: Site, claimed: float, freed: list[str]
) -> None:
    site.hold(0, job_id="12", claimed_boottime=claimed)
    assert release(site, 100.0007).freed == freed


def test_a_claim_of_the_same_tick_may_be_the_next_runs(site: Site) -> None:
    """The world found it: the Epilog looked before that claim, and freed it when its job ran."""
    site.proc.add(60, name="site-epilog", ppid=1, start=1000)
    site.hold(0, job_id="12", claimed_boottime=1000.5 / TICKS)
    begun = epilog.epilog_launch_time(site.node().proc, 60)
    assert release(site, begun).freed == []


def test_an_epilog_of_a_group_whose_leader_is_gone_began_before_every_claim(proc: FakeProc) -> None:
    assert epilog.epilog_launch_time(Proc(str(proc.root)), 60) == 0.0


def test_a_hook_asks_its_own_group_when_it_began(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of the site's that came late is its parent; the hook itself began just now."""
    site.hold(0, job_id="12", claimed_boottime=100.0)
    node, run = site.node(), HookRun()
    run.begun = 200.0
    monkeypatch.setattr(os, "getpgrp", lambda: 60)
    site.proc.add(60, name="site-epilog", ppid=1, start=int(50 * TICKS))
    monkeypatch.setattr(node.settings, "simulation", "")
    assert epilog.release_slurm_job(node, site.call(12), run).freed == []
