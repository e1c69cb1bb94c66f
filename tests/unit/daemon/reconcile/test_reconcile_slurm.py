# SPDX-License-Identifier: Apache-2.0
"""A reconcile on a node of Slurm: what it notes, what it asks, and what goes with a dead job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.deadline import clock_boottime
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import verdicts
from gpulock.store.event_log import count_events, read_events
from tests.support.slurm_site import INVALID, OTHER_UID, ROOT, RUN, SILENT, Site, row
from tests.support.trees import OTHER_BOOT, bus, soon


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A node with slurmd, whose slurmctld does not answer."""
    made = Site(tmp_path)
    made.process(60, "slurmd", uid=ROOT)
    made.fails(SILENT)
    return made


def again(site: Site, dry_run: bool = False) -> ReconcileReport:
    node = site.node()
    report = reconcile_locks(node, make_liveness_judge(node), soon(), dry_run)
    assert report.fault == ""
    return report


def acts(site: Site, dry_run: bool = False) -> list[str]:
    return [outcome.act for outcome in again(site, dry_run).outcomes]


def seen(site: Site, number: int = 0) -> bool:
    node = site.node()
    lock = node.store.read(bus(number))
    node.store.read_details([lock])
    return lock.seen


def claims(site: Site) -> list[str]:
    """Return the tokens of the claims that have a record."""
    return sorted(os.listdir(site.records / "claims"))


def known(site: Site) -> dict[str, str]:
    """Return the published verdicts by token."""
    found, _ = verdicts.read_dated_verdicts(str(site.lock), clock_boottime(), site.node().boot_id)
    assert found is not None
    return {token: one.state for token, one in found.items()}


def test_the_extern_step_is_noted_once_it_was_seen_and_then_absence_counts(site: Site) -> None:
    site.prolog(12, "0,1")
    assert (acts(site), seen(site)) == (["held", "held"], False)
    site.stepd(700, "12.extern")
    assert (acts(site), seen(site, 0), seen(site, 1)) == (["held", "held"], True, True)
    site.proc.remove(700)
    assert acts(site) == ["freed", "freed"]
    assert (site.locks(), site.notes(), claims(site)) == ([], [], [])


@pytest.mark.parametrize("step", ["0", "batch", "interactive"])
def test_no_other_step_is(site: Site, step: str) -> None:
    """Without PrologFlags=Contain nothing of a salloc is here between two steps."""
    site.prolog(12, "0")
    site.stepd(700, f"12.{step}")
    assert (acts(site), seen(site)) == (["held"], False)
    site.proc.remove(700)
    assert acts(site) == ["held"]


def test_a_dry_run_notes_and_frees_nothing(site: Site) -> None:
    site.prolog(12, "0")
    site.stepd(700, "12.extern")
    again(site, dry_run=True)
    assert not seen(site)
    site.proc.remove(700)
    site.fails(INVALID)
    assert acts(site, dry_run=True) == ["freed"]
    assert (site.locks(), site.notes(), len(claims(site))) == ([bus(0)], ["n1.12"], 1)


def test_note_and_record_of_a_dead_job_go_with_its_lock(site: Site) -> None:
    site.prolog(12, "0")
    site.prolog(13, "1")
    site.answers(row(12, State="COMPLETED"), row(13, State="RUNNING"))
    token = site.note(13).token
    assert acts(site) == ["freed", "held"]
    assert (site.locks(), site.notes(), claims(site)) == ([bus(1)], ["n1.13"], [token])
    assert known(site) == {token: "alive"}
    assert count_events(read_events(str(site.lock)))["reaped_slurmctld"] == 1


@pytest.mark.parametrize("changes", [{"uid": OTHER_UID}, {"restart": 0}])
def test_the_note_of_the_present_job_of_an_id_stays(site: Site, changes: dict[str, object]) -> None:
    site.prolog(12, "1", SLURM_JOB_RESTART_COUNT="1")
    site.hold(0, **{"job_id": "12", **changes})
    state = {"State": "RUNNING", "RestartCnt": "1"} if "uid" in changes else {"State": "FAILED"}
    site.answers(row(12, **state))
    outcome = acts(site)
    assert outcome[0] == "freed"
    if outcome[1] == "held":
        assert site.granted() == [bus(1)]


def test_an_earlier_boots_lock_goes_though_a_step_of_its_id_runs(site: Site) -> None:
    """A LOCK_DIR that is kept over a boot, and the job requeued on this node."""
    site.prolog(13, "3")
    site.hold(0, job_id="12", boot_id=OTHER_BOOT)
    site.stepd(700, "12.extern")
    site.stepd(701, "13.extern")
    assert (acts(site), site.locks()) == (["held"], [bus(3)])
    assert known(site) == {site.note(13).token: "alive"}
    assert seen(site, 3)


def test_a_draining_lock_goes_though_another_nodes_step_of_its_id_runs(site: Site) -> None:
    site.prolog(12, "0")
    site.process(900, "python", fds={9: site.dev / "nvidia0"})
    site.epilog(12)
    site.stepd(700, "12.extern")
    again(site)
    assert site.locks() == [bus(0)]
    site.proc.remove(900)
    assert acts(site) == ["freed"]
    assert (known(site), claims(site)) == ({}, [])


def test_nobody_is_asked_where_no_lock_is_slurms(site: Site) -> None:
    site.hold(0, scheduler="process", pid=60, start=1000)
    assert site.prolog(12, None) == RUN
    again(site)
    assert site.calls() == []
