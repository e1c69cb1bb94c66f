# SPDX-License-Identifier: Apache-2.0
"""The Epilog: frees by id and user, never by what a variable says, and ends with 0 in any case."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpulock.alloc.reaper import Reaper
from gpulock.alloc.release import ReleaseResult
from gpulock.deadline import Deadline
from gpulock.hooks.frame import HookRun
from gpulock.isolation import job
from gpulock.node.procfs import TICKS, Proc
from gpulock.slurm import epilog
from gpulock.store import gate
from gpulock.store.gate import Gate
from tests.support.clock import VirtualClock
from tests.support.faults import raising
from tests.support.slurm_site import OTHER_UID, RUN, Site, row
from tests.support.trees import OTHER_BOOT, FakeProc, bus


def test_the_grant_is_given_back_and_a_second_epilog_does_no_harm(site: Site) -> None:
    site.prolog()
    site.epilog()
    assert (site.locks(), site.notes(), site.claims()) == ([], [], [])
    site.prolog(13)
    site.epilog()
    assert (site.locks(), site.notes()) == ([bus(0), bus(1)], ["n1.13"])
    (finished,) = (site.records / "finished").iterdir()
    assert len((finished / "released").read_text().split("epilog\n")) == 3


def test_the_cgroups_of_its_own_steps_go_and_of_no_job_whose_number_begins_so(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    lines: list[str] = []
    monkeypatch.setattr(HookRun, "log", lambda _, line: lines.append(line))

    def end(_: object, prefix: str) -> str:
        ended.append(prefix)
        return "it is busy"

    monkeypatch.setattr(job, "end_job_isolation", end)
    site.prolog()
    site.set(ISOLATION="cgroup")
    site.epilog()
    assert (site.locks(), ended) == ([], ["12."])
    released, kept = lines[-2:]
    assert f"released {bus(0)},{bus(1)} in " in released
    assert "its isolation is kept for now: it is busy" in kept


@pytest.mark.parametrize("gpus", [None, "", "3", "x", "2-3", "0\n1"])
def test_which_devices_slurm_names_does_not_matter(site: Site, gpus: str | None) -> None:
    """slurmctld was down when the job ended: the variable is missing (docs/facts/slurm.md)."""
    site.prolog(12, "0,1")
    site.prolog(13, "2,3")
    site.epilog(12, gpus=gpus)
    assert site.locks() == [bus(2), bus(3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_JOB_ID": "123"},
        {"SLURM_JOB_UID": str(OTHER_UID)},
        {"SLURMD_NODENAME": "n2"},
        {"SLURM_CLUSTER_NAME": "other"},
        {"SLURM_HET_JOB_ID": "12", "SLURM_JOB_ID": "13"},
    ],
)
def test_what_is_of_another_job_user_node_or_cluster_stays(
    site: Site, changes: dict[str, str]
) -> None:
    site.prolog()
    site.epilog(**changes)
    assert (site.locks(), len(site.claims())) == ([bus(0), bus(1)], 1)
    if "SLURM_CLUSTER_NAME" not in changes:
        assert site.notes() == ["n1.12"]


@pytest.mark.parametrize(("own", "epilogs", "stays"), [(0, 0, 0), (0, 1, 0), (2, 2, 0), (2, 1, 2)])
def test_an_epilog_frees_its_own_run_and_earlier_ones(
    site: Site, own: int, epilogs: int, stays: int
) -> None:
    """The Epilog of run 0 of a requeued job says restart 1 already (docs/facts/slurm.md)."""
    site.prolog(SLURM_JOB_RESTART_COUNT=str(own))
    site.epilog(SLURM_JOB_RESTART_COUNT=str(epilogs))
    assert (len(site.locks()), len(site.notes()) * 2, len(site.claims()) * 2) == (stays,) * 3


def test_a_claim_of_an_earlier_boot_is_no_later_one_whatever_its_clock_said(site: Site) -> None:
    site.hold(0, job_id="12", boot_id=OTHER_BOOT, claimed_boottime=1e9)
    site.epilog(12)
    assert site.locks() == []


def test_an_epilog_without_a_prolog_and_without_a_lock_dir_is_no_error(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    site.epilog()
    assert (site.lock.exists(), capfd.readouterr()) == (False, ("", ""))


def test_another_jobs_process_does_not_keep_a_device_though_it_opened_it(site: Site) -> None:
    """Without a device cgroup CUDA opens every node that it can see."""
    site.prolog(12, "0")
    site.prolog(13, "1")
    site.stepd(700, "13.0", uid=0)
    site.process(701, "python", ppid=700, fds={9: site.dev / "nvidia0", 10: site.dev / "nvidia1"})
    site.epilog(12)
    assert site.locks() == [bus(1)]


def test_a_gate_that_stays_shut_leaves_it_to_the_reaper(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LONGEST_WAIT", 0.05)
    site.prolog()
    with Gate(site.node().store, Deadline(1)):
        site.epilog()
    assert (len(site.locks()), site.notes()) == (2, [])


@pytest.mark.parametrize("fault", [KeyError("x"), MemoryError(), OSError(28, "full"), ValueError()])
def test_a_fault_nobody_foresaw_ends_with_0(
    site: Site, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    site.prolog()
    monkeypatch.setattr(Reaper, "finish", raising(fault))
    site.epilog()
    assert (len(site.locks()), site.notes()) == (2, [])


@pytest.mark.parametrize("key", ["SLURM_JOB_ID", "SLURMD_NODENAME"])
def test_garbage_in_the_environment_frees_nothing_and_ends_with_0(
    site: Site, key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    site.prolog()
    site.epilog(**{key: "../n1"})
    assert len(site.locks()) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_settings_driver_or_state_that_are_not_there_end_with_0(site: Site) -> None:
    site.prolog()
    assert epilog.main(site.environ(), str(site.root / "gone")) == 0
    assert epilog.main({}, site.config()) == 0
    assert len(site.locks()) == 2
    shutil.rmtree(site.driver)
    shutil.rmtree(site.state)
    site.epilog()
    assert site.locks() == []


# --- hooks that a killed slurmd left behind come late, and harm no later run of their job ---------

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
