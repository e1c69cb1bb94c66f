# SPDX-License-Identifier: Apache-2.0
"""Locks that were lost within a boot are put back for every living job."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.errors import UNKNOWN, Refusal
from gpulock.sge.spool import RECORD
from gpulock.store import atomic, claim_records, owner
from gpulock.store.owner import Owner
from tests.support.trees import BOOT, OTHER_BOOT, Box, bus, judge_of, record, soon


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """A node whose LOCK_DIR is gone in the middle of its boot."""
    made = Box(tmp_path)
    made.proc.execd(tmp_path)
    (made.state / "boot_id").write_text(BOOT)
    return made


def job(box: Box, pid: int, *numbers: int, **changes: object) -> Owner:
    """Let a job run whose shepherd is `pid` and which holds some devices."""
    one = record(pid=pid, devices=tuple(bus(n) for n in numbers), **{"token": f"t{pid}", **changes})
    folder = box.root / f"active_jobs/{pid}.1"
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(owner.encode_owner(one))
    box.proc.shepherd(pid, folder, uid=os.geteuid())
    return one


def again(box: Box) -> ReconcileReport:
    node = box.node()
    return reconcile_locks(node, judge_of(node), soon())


def holder(box: Box, number: int) -> str:
    found = box.node().store.read(bus(number)).owner
    return found.token if found else "nobody"


def test_what_living_jobs_hold_is_locked_again(box: Box) -> None:
    job(box, 500, 0, 1)
    job(box, 501, 3, job_id="13")
    box.proc.shepherd(502, box.root, uid=os.geteuid())  # a job without GPUs
    assert len(again(box).adopted) == 2
    assert [holder(box, n) for n in range(4)] == ["t500", "t500", "nobody", "t501"]
    assert box.node().store.boot_id() == BOOT
    assert (box.lock / "lost").exists()


@pytest.mark.parametrize("text", ["", "\0" * 37, BOOT[:20], None])
def test_where_the_boot_id_is_garbage_what_lives_is_put_back_before_a_grant(
    box: Box, text: str | None
) -> None:
    job(box, 500, 0)
    claim_records.write_claim_record(
        str(box.state), record(scheduler="process", token="run", devices=(bus(1),))
    )
    (box.state / "boot_id").write_text(text or "")
    if text is None:
        (box.state / "boot_id").unlink()
        (box.state / "runs.whole").touch()
    assert box.node().store.boot_id() == ""
    assert len(again(box).adopted) == 2
    assert holder(box, 0) == "t500"
    assert (box.state / "boot_id").read_text() == f"{BOOT}\n"


@pytest.mark.parametrize("text", ["", "garbage", OTHER_BOOT, None])
def test_a_boot_id_in_state_that_is_not_that_of_the_locks_is_written_again(
    box: Box, text: str | None
) -> None:
    """Otherwise LOCK_DIR could be lost later, and nobody would see it."""
    again(box)
    if text is None:
        (box.state / "boot_id").unlink()
    else:
        (box.state / "boot_id").write_text(text)
    assert again(box).fault == ""
    assert (box.state / "boot_id").read_text() == f"{BOOT}\n"


def test_a_boot_id_in_state_that_cannot_be_written_is_told(box: Box) -> None:
    again(box)
    (box.state / "boot_id").unlink()
    (box.state / "boot_id").mkdir()
    assert f"{box.state}/" in again(box).fault


def test_nothing_is_adopted_twice_or_where_nothing_was_lost(box: Box) -> None:
    job(box, 500, 0)
    again(box)
    assert again(box).adopted == []
    assert box.locks() == [bus(0)]


@pytest.mark.parametrize("changes", [{"boot_id": OTHER_BOOT}, {"start": 999}])
def test_a_record_of_something_else_is_not_adopted(box: Box, changes: dict[str, object]) -> None:
    job(box, 500, 0, **changes)
    assert again(box).adopted == []
    assert box.locks() == []


def garbage(path: Path) -> None:
    path.write_text("gpulock-owner 2\n")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [garbage, fifo, link, folder])
def test_a_record_that_cannot_be_read_stops_the_adoption_and_every_grant(
    box: Box, spoil: object
) -> None:
    job(box, 500, 0)
    job(box, 501, 1)
    assert callable(spoil)
    spoil(box.root / "active_jobs/500.1" / RECORD)
    with pytest.raises(Refusal) as caught:
        again(box)
    assert (caught.value.kind, box.node().store.boot_id()) == (UNKNOWN, "")


@pytest.mark.parametrize("left", ["tok", "token=t5", "token=t500", "token=t500\n"])
@pytest.mark.parametrize("kept", ["the spool", "STATE_DIR"])
def test_a_record_that_was_cut_short_stops_the_adoption_too(box: Box, kept: str, left: str) -> None:
    """Without its devices nothing would be put back, and they would be granted again."""
    job(box, 500, 0)
    place = box.root / "active_jobs/500.1" / RECORD
    if kept == "STATE_DIR":
        own = record(scheduler="process", token="t500")
        place = Path(claim_records.write_claim_record(str(box.state), own))
    text = place.read_text()
    place.write_text(text[: text.index("token=")] + left)
    with pytest.raises(Refusal) as caught:
        again(box)
    assert (caught.value.kind, box.node().store.boot_id()) == (UNKNOWN, "")


@pytest.mark.root
def test_a_record_that_is_not_roots_is_not_believed(box: Box) -> None:
    job(box, 500, 0)
    os.chown(box.root / "active_jobs/500.1" / RECORD, 12345, 12345)
    with pytest.raises(Refusal):
        again(box)


@pytest.mark.parametrize("parent", [500, 1], ids=["of a shepherd", "of one that is gone"])
def test_a_fork_that_hangs_in_a_users_folder_stops_no_adoption(box: Box, parent: int) -> None:
    """On its way to a hook, in a FIFO: its folder is the user's, who may write anything there."""
    job(box, 500, 0)
    home = box.root / "home"
    home.mkdir()
    (home / RECORD).write_text("nonsense")
    root = (os.geteuid(),) * 4
    box.proc.add(501, "sge_shepherd", ppid=parent, uids=root, cwd=home)
    assert len(again(box).adopted) == 1
    assert holder(box, 0) == "t500"


def test_who_cannot_see_everything_adopts_nothing(box: Box) -> None:
    job(box, 500, 0)
    box.proc.add(700)
    (box.proc.root / "700/status").write_text("")
    with pytest.raises(Refusal) as caught:
        again(box)
    assert (caught.value.kind, box.node().store.boot_id()) == (UNKNOWN, "")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_adoption_that_is_killed_is_finished_by_the_next(
    box: Box, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Killed between mkdir and record, the lock must not look like a claim cut short."""
    job(box, 500, 0, 1, 2)
    real = atomic.replace_file
    owners: list[str] = []

    def die(path: str, *more: Any, **about: Any) -> None:
        if path.endswith("/owner"):
            owners.append(path)
            if len(owners) == at:
                raise KeyboardInterrupt
        real(path, *more, **about)

    monkeypatch.setattr(atomic, "replace_file", die)
    with pytest.raises(KeyboardInterrupt):
        again(box)
    monkeypatch.undo()
    again(box)
    assert [holder(box, n) for n in range(3)] == ["t500"] * 3


def test_the_tasks_of_a_parallel_job_keep_their_lock_together(box: Box) -> None:
    job(box, 600, 0, token="t", add_grp_id=65001)
    job(box, 601, 0, token="t", add_grp_id=65002)
    assert len(again(box).adopted) == 1
    assert holder(box, 0) == "t"
    box.proc.remove(600)
    again(box)
    assert holder(box, 0) == "t"
    box.proc.remove(601)
    box.proc.add(700, groups=[65002])
    again(box)
    assert holder(box, 0) == "t"
    box.proc.remove(700)
    again(box)
    assert box.locks() == []


def test_a_later_task_is_adopted_when_the_first_has_ended(box: Box) -> None:
    job(box, 600, 0, token="t")
    job(box, 601, 0, token="t", add_grp_id=65002)
    box.proc.remove(600)
    again(box)
    assert holder(box, 0) == "t"


def test_runs_without_a_scheduler_are_adopted_and_reaped_as_always(box: Box) -> None:
    box.proc.add(500)
    for pid, number in ((500, 0), (501, 1)):
        fields: dict[str, object] = {"scheduler": "process", "add_grp_id": 0, "job_id": str(pid)}
        one = record(pid=pid, devices=(bus(number),), token=f"t{pid}", **fields)
        claim_records.write_claim_record(str(box.state), one)
    assert len(again(box).adopted) == 2
    assert box.locks() == [bus(0)]
    assert os.listdir(box.state / claim_records.FOLDER) == ["t500"]


def test_a_run_of_an_earlier_boot_is_not_adopted(box: Box) -> None:
    claim_records.write_claim_record(
        str(box.state), record(scheduler="process", boot_id=OTHER_BOOT)
    )
    assert again(box).adopted == []


def test_a_run_that_cannot_be_read_stops_the_adoption(box: Box) -> None:
    (box.state / claim_records.FOLDER).mkdir()
    (box.state / claim_records.FOLDER / "t").write_text("garbage")
    with pytest.raises(Refusal):
        again(box)


def test_what_an_interrupted_run_left_stops_no_adoption(box: Box) -> None:
    (box.state / claim_records.FOLDER).mkdir()
    (box.state / claim_records.FOLDER / ".t.0f0f").write_text("gpulock-owner 1\nsched")
    again(box)
    assert box.node().store.boot_id() == BOOT


def test_a_record_of_a_later_version_is_not_overwritten(box: Box) -> None:
    job(box, 500, 0)
    (box.lock / "locks" / bus(0)).mkdir(parents=True)
    (box.lock / "locks" / bus(0) / "owner").write_text("gpulock-owner 2\n")
    again(box)
    assert box.node().store.read(bus(0)).fault != ""


def test_each_lock_that_is_put_back_names_its_own_device(box: Box) -> None:
    job(box, 500, 0, 1, uuid="GPU-00000001-aaaa", minor="1")
    again(box)
    found = [box.node().store.read(bus(n)).owner for n in (0, 1)]
    assert [one.minor for one in found if one] == ["0", "1"]
    assert [one.uuid for one in found if one] == ["GPU-00000000-aaaa", "GPU-00000001-aaaa"]


def test_the_locks_of_an_earlier_boot_are_not_adopted(box: Box) -> None:
    job(box, 500, 0, boot_id=OTHER_BOOT)
    (box.state / "boot_id").write_text(OTHER_BOOT)
    assert again(box).adopted == []
    assert box.node().store.boot_id() == BOOT
    shutil.rmtree(box.lock)
