# SPDX-License-Identifier: Apache-2.0
"""Locks that are neither there nor released are put back, whatever removed them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.reaper import free_lock
from gpulock.alloc.release import release_locks
from gpulock.daemon.history.pending import find_lost_claims, is_claim_fully_released
from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.daemon.reconcile.report_messages import reconcile_event_messages
from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.procfs import ProcessStatus
from gpulock.sge.spool import RECORD
from gpulock.store import atomic, claim_records, owner
from gpulock.store.locks import LockStore
from gpulock.workstation.process_claims import claim_for_process, make_process_owner
from tests.support.claims import ask, empty_all, empty_one, holder, lose_one, refused
from tests.support.trees import Box, box_with_shepherd, bus, judge_of, soon


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """A node with an execd and a shepherd below it."""
    return box_with_shepherd(tmp_path)


def again(box: Box) -> ReconcileReport:
    node = box.node()
    return reconcile_locks(node, judge_of(node), soon())


def holders(box: Box) -> list[str]:
    store = box.node().store
    found = [store.read(bus(number)).owner for number in range(4)]
    return [one.token if one else "" for one in found]


def lose_all(locks: Path) -> None:
    shutil.rmtree(locks)


def lose_files(locks: Path) -> None:
    """What `rm LOCK_DIR/*` leaves, and somebody removes the locks as well."""
    for path in locks.parent.iterdir():
        if path.is_file() and not path.name.startswith("grant."):
            path.unlink()
    shutil.rmtree(locks)


@pytest.mark.parametrize("lose", [lose_all, empty_all, lose_one, empty_one, lose_files])
def test_lost_locks_of_the_living_are_put_back_as_they_were(
    box: Box, lose: Callable[[Path], None]
) -> None:
    token = ask(box).owner.token
    before = {name: (box.lock / "locks" / name / "owner").read_bytes() for name in box.locks()}
    lose(box.lock / "locks")
    report = again(box)
    assert {n: (box.lock / "locks" / n / "owner").read_bytes() for n in box.locks()} == before
    assert [one.token for one in report.adopted] == [token]
    assert "its locks were lost" in reconcile_event_messages(report)[0]
    ask(box, 2, job_id="13", pid=501)
    assert holders(box)[:2] == [token, token]
    assert again(box).adopted == []


def test_only_what_was_lost_is_told_as_put_back(box: Box) -> None:
    ask(box)
    lose_one(box.lock / "locks")
    assert [one.devices for one in again(box).adopted] == [(bus(1),)]


def test_a_lost_lock_of_the_dead_is_freed_with_its_line_for_the_history(box: Box) -> None:
    token = ask(box).owner.token
    lose_all(box.lock / "locks")
    box.proc.remove(500)
    report = again(box)
    assert (box.locks(), [one.act for one in report.outcomes]) == ([], ["freed", "freed"])
    assert sorted(os.listdir(box.lock / "released")) == [f"{token}.{bus(n)}" for n in (0, 1)]
    assert grants(box) == []


def release(box: Box, grant: Grant) -> None:
    node = box.node()
    release_locks(node, lambda o: o.token == grant.owner.token, judge_of(node), soon(), "epilog")


def grants(box: Box) -> list[str]:
    return sorted(name[6:] for name in os.listdir(box.lock) if name.startswith("grant."))


def test_a_released_lock_is_not_put_back(box: Box) -> None:
    grant = ask(box)
    release(box, grant)
    assert (box.locks(), grants(box)) == ([], [])
    shutil.rmtree(box.lock / "released")
    report = again(box)
    assert (box.locks(), report.adopted) == ([], [])


@pytest.mark.parametrize("at", ["rename", "unlink"])
def test_a_release_that_is_killed_is_no_loss(
    box: Box, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whatever it had done by then, the lock stands, or is released; it is not put back."""
    grant = ask(box, 1)
    real = getattr(os, at)

    def die(path: str, *more: object, **about: object) -> None:
        if "grant." in path or "locks/" in path:
            raise KeyboardInterrupt
        real(path, *more, **about)

    monkeypatch.setattr(os, at, die)
    with pytest.raises(KeyboardInterrupt):
        release(box, grant)
    monkeypatch.undo()
    assert box.locks() == [bus(0)]
    assert again(box).adopted == []
    release(box, grant)
    assert (box.locks(), grants(box)) == ([], [])


def test_a_put_back_that_is_cut_short_refuses_claims_and_is_done_by_the_next(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = ask(box).owner.token
    lose_all(box.lock / "locks")
    real = os.link

    def die(*paths: str, **about: object) -> None:
        if paths[1].endswith(f"{bus(1)}/owner"):
            raise KeyboardInterrupt
        real(*paths, **about)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", die)
    with pytest.raises(KeyboardInterrupt):
        again(box)
    monkeypatch.undo()
    assert refused(box, 1, job_id="13", pid=501).kind == UNKNOWN
    again(box)
    assert holders(box)[:2] == [token, token]


def lose_every_name(box: Box) -> None:
    """Remove locks with their second names, as `find LOCK_DIR -name '0000*'` may have done it."""
    for name in box.locks():
        shutil.rmtree(box.lock / "locks" / name)
        (box.lock / f"grant.{name}").unlink()


def round_after(box: Box, last: ReconcileReport) -> ReconcileReport:
    node = box.node()
    stood = [one.lock for one in last.outcomes]
    return reconcile_locks(node, judge_of(node), soon(), stood=stood)


def test_gpulockd_remembers_the_locks_of_the_living_that_nothing_is_left_of(box: Box) -> None:
    token = ask(box).owner.token
    last = again(box)
    lose_every_name(box)
    assert [one.token for one in round_after(box, last).adopted] == [token]
    assert holders(box)[:2] == [token, token]


def test_gpulockd_remembers_no_lock_of_the_dead(box: Box) -> None:
    ask(box)
    last = again(box)
    lose_every_name(box)
    box.proc.remove(500)
    assert round_after(box, last).adopted == []
    assert box.locks() == []


def test_gpulockd_remembers_no_lock_that_was_released_or_is_anothers_by_now(box: Box) -> None:
    first = ask(box, 1)
    last = again(box)
    release(box, first)
    assert round_after(box, last).adopted == []
    shutil.rmtree(box.lock / "released")
    (box.lock / "released").mkdir()
    box.proc.shepherd(501, box.root)
    token = ask(box, 1, job_id="13", pid=501).owner.token
    assert round_after(box, last).adopted == []
    assert holders(box)[0] == token


@pytest.mark.parametrize("kept", [True, False])
def test_of_a_process_gpulockd_remembers_what_its_record_still_has(box: Box, kept: bool) -> None:
    """Its owner may live on after it gave a device back; the line is in the history by then."""
    box.proc.add(900)
    node = box.node()
    own = make_process_owner(node, 900, "alice")
    grant = claim_for_process(node, own, ClaimRequest(1), soon())
    last = again(box)
    if kept:
        lose_every_name(box)
    else:
        lock = node.store.read(bus(0))
        free_lock(node, lock, "given back")
        shutil.rmtree(box.lock / "released")
    assert len(round_after(box, last).adopted) == kept
    assert holders(box)[0] == (grant.owner.token if kept else "")


def test_a_task_that_shares_a_lost_lock_keeps_it_again(box: Box) -> None:
    one = ask(box).owner
    folder = box.root / "active_jobs/12.1/1.node1"
    folder.mkdir(parents=True)
    own = one.copy(pid=501, add_grp_id=65000)
    (folder / RECORD).write_text(owner.encode_owner(own))
    box.proc.shepherd(501, folder, uid=os.geteuid())
    lose_all(box.lock / "locks")
    again(box)
    lock = box.node().store.read(bus(0))
    box.node().store.read_details(lock)
    assert lock.anchors == [(501, 1000, 65000)]
    assert (lock.owner and lock.owner.pid) == 500


def test_a_lock_without_its_second_name_gets_one(box: Box) -> None:
    """Of a version that knew none, or of a release that was cut short."""
    token = ask(box).owner.token
    for name in grants(box):
        (box.lock / f"grant.{name}").unlink()
    again(box)
    lose_all(box.lock / "locks")
    again(box)
    assert holders(box)[:2] == [token, token]


def test_a_rewritten_record_is_put_back_as_it_was_last(box: Box) -> None:
    ask(box, 1)
    box.proc.add(700, groups=[65400])  # of the job: so its lock drains, and stays
    box.node().store.rewrite(bus(0), holder(box, 0).copy(draining=1))
    lose_all(box.lock / "locks")
    again(box)
    assert holder(box, 0).draining == 1


@pytest.mark.parametrize("at", ["rename", "link"])
def test_a_rewrite_that_is_killed_leaves_no_older_record_behind(
    box: Box, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    ask(box, 1)
    box.proc.add(700, groups=[65400])

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, at, die)
        box.node().store.rewrite(bus(0), holder(box, 0).copy(draining=1))
    assert grants(box) == []
    stood = holder(box, 0).draining
    again(box)
    lose_all(box.lock / "locks")
    again(box)
    assert holder(box, 0).draining == stood == (at == "link")


def test_a_lost_lock_that_cannot_be_read_is_held(box: Box) -> None:
    ask(box, 1)
    lose_all(box.lock / "locks")
    (box.lock / f"grant.{bus(0)}").write_text("gpulock-owner 2\n")
    assert [outcome.lock.id for outcome in again(box).outcomes] == [bus(0)]
    assert box.node().store.read(bus(0)).fault
    assert holders(box)[0] == ""
    ask(box, 1, job_id="13", pid=501)
    assert holders(box)[1]


def test_nothing_is_put_back_where_no_process_can_be_seen(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who shares a lock could not be found out: claims are refused until then."""
    ask(box)
    lose_all(box.lock / "locks")

    def see_nothing(scan: ProcessScan) -> dict[int, ProcessStatus]:
        scan.blind = "hidden"
        return {}

    monkeypatch.setattr(ProcessScan, "statuses", see_nothing)
    with pytest.raises(Refusal):
        again(box)
    assert box.locks() == []


def test_what_was_lost_in_an_earlier_boot_is_not_put_back(box: Box) -> None:
    ask(box)
    shutil.rmtree(box.lock / "locks")
    box.proc.boot("another-boot")
    ask(box, 4, boot_id="another-boot")
    assert len(set(holders(box))) == 1


def test_with_every_mark_of_the_boot_lost_as_well_nothing_is_granted(box: Box) -> None:
    token = ask(box).owner.token
    shutil.rmtree(box.lock / "locks")
    (box.lock / "boot_id").unlink()
    (box.state / "boot_id").unlink()
    assert refused(box, 1, job_id="13", pid=501).kind == UNKNOWN
    again(box)
    assert holders(box)[:2] == [token, token]


def test_a_lost_claim_is_not_over_for_the_history(box: Box) -> None:
    one = ask(box).owner
    kept = claim_records.write_claim_record(str(box.state), one)
    claim_records.record_pending_history(str(box.state), str(box.lock), one, kept)
    lose_all(box.lock / "locks")
    faults: set[str] = set()
    assert find_lost_claims(box.node(), [one.token], faults, 1e10) == {}
    assert faults == set()


def test_a_claim_with_a_lost_lock_is_not_fully_released(box: Box) -> None:
    node = box.node()
    grant = ask(box)
    lose_one(box.lock / "locks")
    node.store.retire(node.store.read(bus(0)), "test")
    from gpulock.daemon.history.pending import read_released_claims

    parts = read_released_claims(node.store, set())[grant.owner.token]
    assert not is_claim_fully_released(node.store, grant.owner.token, parts)


def test_a_device_whose_lock_is_lost_cannot_be_locked_again(box: Box) -> None:
    ask(box, 1)
    lose_all(box.lock / "locks")
    (box.lock / "locks").mkdir()
    store = LockStore(str(box.lock))
    with pytest.raises(OSError, match="lost"):
        store.make(bus(0), holder_text(box))
    assert box.locks() == []


def holder_text(box: Box) -> owner.Owner:
    return owner.parse_owner(atomic.read_text(f"{box.lock}/grant.{bus(0)}")).copy(token="other")


def test_a_lock_that_was_emptied_is_not_taken_for_a_claim_that_was_cut_short(box: Box) -> None:
    ask(box, 1)
    empty_one_of(box, 0)
    store = box.node().store
    with pytest.raises(Refusal, match="were lost"):
        store.retire(store.read(bus(0)), "test")
    assert box.locks() == [bus(0)]


def empty_one_of(box: Box, number: int) -> None:
    for path in (box.lock / "locks" / bus(number)).iterdir():
        path.unlink()
