# SPDX-License-Identifier: Apache-2.0
"""Reaping under the gate: what is proven dead goes, all else stays."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gpulock.alloc import process_reader, reaper
from gpulock.alloc.job_processes import JobProcesses
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.reaper import FREED, HELD, ORPHANS, ReapOutcome
from gpulock.alloc.release import ReleaseResult
from gpulock.errors import BROKEN, BUSY, Refusal
from gpulock.store import grants
from gpulock.store.locks import Lock, LockStore
from gpulock.store.owner import Owner
from gpulock.store.verdicts import ALIVE, DEAD, UNKNOWN
from tests.support.faults import raising
from tests.support.locks import place_lock, say_mps
from tests.support.trees import OTHER_BOOT, Box, box_at_work, bus, judge_of, record


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return box_at_work(tmp_path)


def lock(box: Box, number: int = 0, **changes: object) -> Owner:
    one = record(devices=(bus(number),), **changes)
    place_lock(box.node().store, bus(number), one)
    return one


def make_reaper(box: Box, judge: Judge | None = None) -> reaper.Reaper:
    node = box.node()
    held = node.store.read_all_locks()
    return reaper.Reaper(node, judge or judge_of(node), node.devices(), held)


def reap_all(box: Box) -> dict[str, ReapOutcome]:
    engine = make_reaper(box)
    return {outcome.lock.id: outcome for outcome in engine.finish([*engine.held.values()])}


@pytest.mark.parametrize(
    ("name", "inventory"),
    [
        (bus(0), ()),
        (f"{bus(0)}.gi1.ci0", ()),
        (bus(0), (f"gpu.{bus(0)}.mig=1", f"mig.{bus(0)}.gi1.ci0.uuid=MIG-a")),
        (bus(9), ()),
    ],
    ids=["a card", "an instance", "a card that is split", "a card that is gone"],
)
def test_the_last_guard_stops_a_reap_also_of_what_the_node_does_not_show_any_more(
    box: Box, name: str, inventory: tuple[str, ...]
) -> None:
    box.inventory(*inventory)
    place_lock(box.node().store, name, record(devices=(name,), minors=("0",)))
    box.proc.add(700, fds={9: box.dev / "nvidia0"})
    outcome = reap_all(box)[name]
    assert (outcome.act, outcome.reason) == (ORPHANS, f"process 700 has {name} open")
    assert outcome.verdict.orphans == outcome.reason
    box.proc.remove(700)
    assert reap_all(box)[name].act == FREED


def act(box: Box, number: int = 0) -> str:
    return reap_all(box)[bus(number)].act


def test_the_guard_stops_the_reap_of_another_boots_lock_as_well(box: Box) -> None:
    owner = lock(box, boot_id=OTHER_BOOT)
    box.proc.add(700, fds={9: box.dev / "nvidia0"})
    assert act(box) == ORPHANS
    look = make_reaper(box)
    look.files.seconds = -1.0
    (outcome,) = look.finish([*look.held.values()])
    assert (outcome.act, outcome.reason) == (HELD, look.files.users_by_device(owner.uid)[1])
    box.proc.remove(700)
    assert act(box) == FREED


def test_what_a_scheduler_has_of_a_job_now_is_not_left_of_its_claim_before_the_boot(
    box: Box,
) -> None:
    """The job may have been requeued, and run here again."""

    def left(_: Lock, __: ProcessScan, job: JobProcesses) -> None:
        job.add((700,), "is in the job's cgroup")

    lock(box, 0, boot_id=OTHER_BOOT, token="old")
    node = box.node()
    judge = Judge(node.boot_id, ProcessScan(node.proc), {}, {"sge": left})
    (outcome,) = make_reaper(box, judge).finish([*node.store.read_all_locks().values()])
    assert outcome.act == FREED


@pytest.mark.parametrize(
    "text", ["gpulock-owner 2\nscheduler=sge\n", "\n", "garbage", "gpulock-owner 1\npid=x\n"]
)
def test_a_record_that_cannot_be_understood_is_held(box: Box, text: str) -> None:
    (box.lock / "locks" / bus(0)).mkdir()
    (box.lock / "locks" / bus(0) / "owner").write_text(text)
    found = reap_all(box)[bus(0)]
    assert (found.act, "owner record" in found.reason) == (HELD, True)
    assert box.locks() == [bus(0)]


def test_what_an_interrupted_anchor_left_is_no_anchor(box: Box) -> None:
    folder = box.records / "claims" / lock(box).token / "anchors"
    folder.mkdir()
    (folder / ".600.5.0f0f0f").write_text("")
    assert act(box) == FREED


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), ""),
        (OSError(errno.ENOSPC, "full"), "it cannot be freed: [Errno 28] full"),
    ],
)
def test_what_keeps_a_device_is_told_although_it_cannot_be_noted(
    box: Box, monkeypatch: pytest.MonkeyPatch, fault: OSError, told: str
) -> None:
    lock(box)
    box.proc.add(700, fds={9: box.dev / "nvidia0"})
    engine = make_reaper(box)
    monkeypatch.setattr(LockStore, "mark_draining", raising(fault))
    (outcome,) = engine.finish(list(engine.held.values()), reaper.ENDED)
    assert (outcome.act == FREED, outcome.fault) == (False, told)


def test_the_mps_of_a_card_keeps_no_lock(box: Box) -> None:
    """gpulockd ends it, and closes the card until then."""
    lock(box)
    box.proc.add(700, start=7, fds={9: box.dev / "nvidia0"})
    assert act(box) == ORPHANS
    say_mps(box.node().store, "700 7\n")
    assert act(box) == FREED


def test_a_claim_that_is_over_by_now_is_neither_freed_nor_kept(box: Box) -> None:
    one = lock(box)
    engine = make_reaper(box)
    grants.undo_claim(engine.node.store, one.token, one.devices)
    (outcome,) = engine.finish([*engine.held.values()])
    assert (outcome.act, outcome.changed) == (HELD, True)
    result = ReleaseResult()
    result.add(outcome)
    assert (result.freed, result.kept) == ([], [])


def test_a_lock_that_cannot_be_given_back_is_refused(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock(box)
    node = box.node()
    held = node.store.read_all_locks()
    monkeypatch.setattr(grants, "release_devices", raising(OSError(errno.EROFS, "read-only")))
    with pytest.raises(Refusal, match="cannot be freed") as caught:
        reaper.free_locks(node, [*held.values()], "given back")
    assert caught.value.kind == BROKEN


@pytest.mark.attack
@pytest.mark.parametrize("slow", ["environments", "open files"])
def test_a_dead_claim_whose_users_crowd_takes_too_long_is_unknown_by_one_steady_reason(
    box: Box, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Tried: a claim that ended beside processes with 20,000 descriptors each: it was told as dead
    and freed at once, which it never was, or named another process each time.

    Stopped by: it is unknown, and the reason names the user alone.
    """
    lock(box, scheduler="process", add_grp_id=0)
    for pid in (700, 701):
        box.proc.add(pid, uids=(1000,) * 4, fds={9: box.dev / "nvidia5"})
    look = make_reaper(box)
    if slow == "environments":
        monkeypatch.setattr(process_reader, "ONE_USER", -1.0)
    else:
        look.files.seconds = -1.0
    (outcome,) = look.finish([*look.held.values()])
    why = "uid 1000 has more processes and open files than can be looked at in time"
    assert (outcome.act, outcome.verdict.state, outcome.verdict.proof) == (HELD, UNKNOWN, why)


def test_a_users_process_that_has_the_device_open_keeps_the_claim_of_a_process_alive(
    box: Box,
) -> None:
    """What dropped its environment keeps it, as docs/workstation.md says."""
    lock(box, scheduler="process", add_grp_id=0)
    box.proc.add(700, fds={9: box.dev / "nvidia0"})
    outcome = reap_all(box)[bus(0)]
    assert (outcome.act, outcome.verdict.state, outcome.verdict.orphans) == (HELD, ALIVE, "")
    assert outcome.verdict.proof == outcome.reason == f"process 700 has {bus(0)} open"


def test_what_a_process_has_open_is_not_given_back(box: Box) -> None:
    lock(box)
    box.proc.add(700, fds={9: box.dev / "nvidia0"})
    engine = make_reaper(box)
    with pytest.raises(Refusal, match=f"process 700 has {bus(0)} open") as caught:
        engine.give_back([*engine.held.values()], "release")
    assert caught.value.kind == BUSY
    assert [*box.node().store.read_all_locks()] == [bus(0)]


def test_a_claim_of_which_one_device_is_open_is_freed_of_the_others_by_the_proof_of_its_death(
    box: Box,
) -> None:
    both = record(devices=(bus(0), bus(1)), minors=("0", "1"), scheduler="process", add_grp_id=0)
    for name in both.devices:
        place_lock(box.node().store, name, both)
    box.proc.add(700, fds={9: box.dev / "nvidia0"})
    kept, freed = reap_all(box).values()
    assert (kept.act, kept.verdict.state) == (HELD, ALIVE)
    assert (freed.act, freed.verdict.state) == (FREED, DEAD)
    assert freed.reason == "process 500 is gone, and all that is of its claim"
