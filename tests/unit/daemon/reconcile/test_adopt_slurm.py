# SPDX-License-Identifier: Apache-2.0
"""Locks of Slurm jobs that were lost within a boot are put back, and their tasks' notes too."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.errors import Refusal
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import atomic, boot, claim_records
from tests.support.slurm_site import INVALID, OTHER_UID, ROOT, RUN, SILENT, Site, row, slurm_record
from tests.support.trees import OTHER_BOOT, bus, soon

OURS = {"SLURM_DEVICE_SELECTION": "gpulock"}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A node whose slurmctld does not answer, and whose jobs have their extern steps."""
    made = Site(tmp_path)
    made.process(60, "slurmd", uid=ROOT)
    made.stepd(700, "12.extern")
    made.stepd(701, "13.extern")
    made.fails(SILENT)
    return made


def lose(site: Site) -> None:
    shutil.rmtree(site.lock)


def again(site: Site) -> ReconcileReport:
    node = site.node()
    return reconcile_locks(node, make_liveness_judge(node), soon())


def facts(site: Site, job: int = 12, slurmd: str = "n1") -> list[object]:
    """Return all that the tasks of a job are told."""
    found = site.note(job, slurmd)
    devices = [(d.id, d.index, d.uuid) for d in found.devices]
    return [found.token, found.uid, found.restart, found.positions, found.binds, devices]


@pytest.mark.parametrize("keys", [{}, OURS])
def test_lock_and_note_of_a_living_job_are_put_back(site: Site, keys: dict[str, str]) -> None:
    site.set(**keys)
    site.shuffled()
    site.prolog(12, "1,3", SLURM_JOB_RESTART_COUNT="2", SLURM_HET_JOB_ID="11")
    site.prolog(13, "0")
    told = facts(site), facts(site, 13)
    records = {name: site.node().store.read(name).owner for name in site.locks()}
    lose(site)
    report = again(site)
    assert (len(report.adopted), report.fault) == (2, "")
    assert [o.act for o in report.outcomes] == ["held"] * 3
    assert (facts(site), facts(site, 13)) == told
    for name, record in records.items():
        found = site.node().store.read(name).owner
        assert found is not None and record is not None
        assert found.__dict__ == record.__dict__


def test_until_then_no_job_gets_a_device(site: Site) -> None:
    site.prolog(12, "0")
    lose(site)
    assert site.prolog(14, "1") == RUN
    site.refused(14, "unknown")
    again(site)
    assert site.prolog(14, "1") == RUN
    assert site.granted(14) == [bus(1)]


def test_an_adopted_job_ends_as_any_other(site: Site) -> None:
    site.prolog(12, "0,1")
    lose(site)
    again(site)
    site.epilog(12)
    assert (site.locks(), site.notes(), site.runs()) == ([], [], [])


def test_several_nodes_of_one_machine_get_their_own_back(site: Site) -> None:
    site.prolog(12, "0")
    site.prolog(12, "1", SLURMD_NODENAME="n2")
    lose(site)
    again(site)
    assert (site.granted(), site.granted(slurmd="n2")) == ([bus(0)], [bus(1)])


def test_a_job_that_ended_meanwhile_is_restored_and_reaped_as_always(site: Site) -> None:
    site.prolog(14, "2")
    lose(site)
    site.fails(INVALID)
    report = again(site)
    assert [o.act for o in report.outcomes] == ["freed"]
    assert (site.locks(), site.notes(), site.runs()) == ([], [], [])


def test_a_job_nobody_knows_of_stays_until_slurmctld_answers(site: Site) -> None:
    """That a step of it was seen was lost with its lock."""
    site.prolog(14, "2")
    lose(site)
    assert [o.act for o in again(site).outcomes] == ["held"]
    site.answers(row(14, State="COMPLETED"))
    assert [o.act for o in again(site).outcomes] == ["freed"]


@pytest.mark.parametrize("spoil", ["settled", "second"])
def test_a_claim_that_was_freed_by_another_claim_is_not_put_back(site: Site, spoil: str) -> None:
    """Its leftover record would take the device of the job that lives."""
    site.proc.remove(701)
    for number in range(8):  # whatever order the tokens sort in
        job = 20 + number
        site.prolog(job, "0")
        if spoil == "settled":
            site.process(900, "python", fds={9: site.dev / "nvidia0"})
            site.epilog(job)
            site.proc.remove(900)
            site.prolog(12, "0")
        else:
            site.prolog(job, "0", SLURM_JOB_RESTART_COUNT="1")
        token = site.holder(0).token
        lose(site)
        site.fails(INVALID) if spoil == "settled" else site.answers(row(job, RestartCnt="1"))
        again(site)
        assert (site.locks(), site.holder(0).token) == ([bus(0)], token)
        assert site.runs() == [token]
        site.epilog(12 if spoil == "settled" else job, SLURM_JOB_RESTART_COUNT="1")
        assert site.locks() == []


@pytest.mark.parametrize("first", ["a", "z"])
def test_of_two_records_that_name_one_device_the_later_claim_has_it(site: Site, first: str) -> None:
    site.prolog(99, "3")
    site.epilog(99)
    old = slurm_record(job_id="14", token=f"{first}1", claimed_boottime=10.0)
    new = slurm_record(job_id="12", token="m1", claimed_boottime=20.0)
    for record in (old, new):
        claim_records.write_claim_record(str(site.state), record)
    lose(site)
    site.fails(INVALID)
    again(site)
    assert (site.locks(), site.holder(0).token) == ([bus(0)], "m1")


def test_the_note_of_a_job_that_has_two_records_is_of_its_later_claim(site: Site) -> None:
    site.prolog(99, "3")
    site.epilog(99)
    for token, when in (("z1", 10.0), ("a1", 20.0)):
        claim_records.write_claim_record(
            str(site.state), slurm_record(token=token, claimed_boottime=when)
        )
    lose(site)
    again(site)
    assert (site.note().token, site.holder(0).token) == ("a1", "a1")


def test_what_is_left_of_a_job_whose_other_device_is_free_is_put_back(site: Site) -> None:
    site.prolog(12, "0,1")
    site.proc.remove(700)
    site.process(900, "python", fds={9: site.dev / "nvidia1"})
    site.epilog(12)
    assert site.locks() == [bus(1)]
    lose(site)
    again(site)
    assert site.locks() == [bus(1)]
    assert site.prolog(13, "0") == RUN
    assert site.granted(13) == [bus(0)]


@pytest.mark.parametrize("keys", [{}, OURS])
def test_a_card_that_is_gone_does_not_keep_the_others_from_being_put_back(
    site: Site, keys: dict[str, str]
) -> None:
    site.set(**keys)
    site.prolog(12, "0,1")
    site.prolog(13, "2")
    lose(site)
    shutil.rmtree(site.driver / "gpus" / bus(1))
    again(site)
    assert site.locks() == [bus(0), bus(1), bus(2)]
    assert site.granted(13) == [bus(2)]
    assert site.notes() == ["n1.13"]


def test_a_map_that_is_gone_makes_no_note_of_a_guess(site: Site) -> None:
    site.prolog(12, "0,1")
    lose(site)
    (site.state / "slurm-map").unlink()
    again(site)
    assert (site.locks(), site.notes()) == ([bus(0), bus(1)], [])


def test_without_its_driver_set_a_job_is_put_back_but_its_next_steps_do_not_start(
    site: Site,
) -> None:
    site.prolog(12, "0")
    lose(site)
    site.set(DRIVER_DIR=str(site.root))
    assert len(again(site).adopted) == 1
    assert site.notes() == []


def test_what_gpulock_run_holds_is_put_back_without_a_note(site: Site) -> None:
    site.prolog(99, "3")
    site.epilog(99)
    claim_records.write_claim_record(
        str(site.state), slurm_record(scheduler="process", slurmd="", pid=60, start=1000)
    )
    lose(site)
    again(site)
    assert (site.locks(), site.notes()) == ([bus(0)], [])


def test_the_first_claim_of_a_boot_forgets_what_earlier_boots_left(site: Site) -> None:
    site.prolog(12, "0")
    site.prolog(13, "1")
    site.proc.boot(OTHER_BOOT)
    site.proc.remove(700)
    site.proc.remove(701)
    assert site.prolog(14, "2") == RUN
    assert site.runs() == [site.note(14).token]


@pytest.mark.parametrize(
    "changes", [{"boot_id": OTHER_BOOT}, {"boot_id": OTHER_BOOT, "uid": OTHER_UID}]
)
def test_a_record_of_an_earlier_boot_is_not_put_back(
    site: Site, changes: dict[str, object]
) -> None:
    site.prolog(99, "3")
    site.epilog(99)
    claim_records.write_claim_record(str(site.state), slurm_record(**changes))
    lose(site)
    assert again(site).adopted == []
    assert (site.locks(), site.notes()) == ([], [])


@pytest.mark.parametrize("at", range(1, 7))
def test_an_adoption_that_is_killed_is_finished_by_the_next(
    site: Site, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    site.prolog(12, "0,1")
    site.prolog(13, "2")
    told = facts(site), facts(site, 13)
    lose(site)
    real = os.rename
    calls: list[str] = []

    def die(source: str, target: str, **more: int | None) -> None:
        calls.append(target)
        if len(calls) == at:
            raise KeyboardInterrupt
        real(source, target, **more)

    monkeypatch.setattr(os, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        again(site)
    monkeypatch.undo()
    assert site.prolog(14, "3") == RUN
    if site.node().store.boot_id() == "":
        site.refused(14, "unknown")
    again(site)
    assert (facts(site), facts(site, 13)) == told
    assert site.granted() == [bus(0), bus(1)]


def test_a_note_that_cannot_be_written_stops_the_adoption_and_every_grant(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.prolog(12, "0")
    lose(site)
    real = atomic.replace_file

    def full(path: str, *more: Any, **about: Any) -> None:
        if "/tasks/" in path:
            raise OSError(28, "no space")
        real(path, *more, **about)

    monkeypatch.setattr(atomic, "replace_file", full)
    with pytest.raises(OSError):
        again(site)
    assert site.node().store.boot_id() == ""
    monkeypatch.undo()
    again(site)
    assert site.granted() == [bus(0)]


def test_a_dry_run_adopts_nothing(site: Site) -> None:
    site.prolog(12, "0")
    lose(site)
    node = site.node()
    assert reconcile_locks(node, make_liveness_judge(node), soon(), dry_run=True).adopted == []
    assert not site.lock.exists()


def test_locks_that_go_again_while_they_are_put_back_are_lost_still(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rm -rf` of LOCK_DIR goes on while a reconcile adopts: the boot id comes last, and stays."""
    site.prolog(12, "0")
    (site.lock / "boot_id").unlink()
    begin = boot.begin_boot

    def rm_goes_on(*words: Any) -> None:
        begin(*words)
        (site.lock / f"grant.{bus(0)}").unlink()
        shutil.rmtree(site.lock / "locks" / bus(0))

    with monkeypatch.context() as patch:
        patch.setattr(boot, "begin_boot", rm_goes_on)
        with pytest.raises(Refusal, match="were lost"):
            again(site)
    assert site.prolog(14, "0") == RUN
    site.refused(14, "unknown")
    again(site)
    assert site.locks() == site.granted(12) == [bus(0)]


def test_a_job_that_ended_while_its_lock_was_lost_leaves_no_record(site: Site) -> None:
    site.prolog(12, "0")
    stood = list(site.node().store.read_all_locks().values())
    again(site)
    (site.lock / f"grant.{bus(0)}").unlink()
    shutil.rmtree(site.lock / "locks" / bus(0))
    site.proc.remove(700)
    site.answers(row(12, State="COMPLETED"))
    node = site.node()
    report = reconcile_locks(node, make_liveness_judge(node), soon(), stood=stood)
    assert [one.act for one in report.outcomes] == ["freed"]
    assert (site.locks(), site.runs()) == ([], [])
