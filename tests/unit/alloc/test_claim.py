# SPDX-License-Identifier: Apache-2.0
"""A claim: all devices or none, the same for the same run, nothing from a living owner."""

from __future__ import annotations

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.same_job import select_own_locks
from gpulock.daemon.health.cards import read_cards, save_cards
from gpulock.errors import BUSY
from gpulock.store import boot, quarantine
from gpulock.store.locks import Lock
from tests.support.claims import ask, holder, ids, never, refused, totals
from tests.support.locks import change_record, place_lock, retire_lock
from tests.support.trees import OTHER_BOOT, Box, bus, record, soon


def test_the_same_run_gets_the_same_answer(box: Box) -> None:
    first = ask(box)
    node = box.node()
    again = claim_devices(node, record(token="", devices=()), ClaimRequest(2), never, soon())
    assert (ids(again), again.owner.token) == (ids(first), first.owner.token)
    assert (first.fresh, again.fresh) == (True, False)
    assert totals(box)["claims_granted"] == "1"


def test_part_of_a_grant_that_somebody_uses_is_not_given_up(box: Box) -> None:
    ask(box)
    retire_lock(box.node().store, box.node().store.read(bus(0)), "by hand")
    box.proc.add(700, fds={9: box.dev / "nvidia1"})
    assert refused(box).kind == BUSY
    assert box.locks() == [bus(1)]


def test_a_grant_that_is_being_released_is_not_given_again(box: Box) -> None:
    first = ask(box)
    store = box.node().store
    for number in (0, 1):
        change_record(store, bus(number), holder(box, number).copy(draining=1))
    assert ask(box).owner.token != first.owner.token


def test_a_refusal_names_a_job_that_has_ended_while_its_processes_have_not(box: Box) -> None:
    first = ask(box, 4)
    box.node().store.mark_draining(first.owner.token)
    box.proc.add(700, groups=(100, first.owner.add_grp_id))
    assert "job 12, which has ended, but not its processes" in refused(box, job_id="13").why


def test_a_refusal_names_the_user_of_a_claim_without_a_scheduler(box: Box) -> None:
    ask(box, 3, job_id="4711", scheduler="process", add_grp_id=0)
    assert "2: pid 4711 of alice; 3: free" in refused(box, job_id="13").why


@pytest.mark.parametrize("why", ["shepherd", "group", "device", "blind"])
def test_an_earlier_run_that_is_not_proven_dead_is_a_refusal(box: Box, why: str) -> None:
    first = ask(box)
    box.proc.shepherd(501, box.root)
    if why != "shepherd":
        box.proc.remove(500)
    if why == "group":
        box.proc.add(700, groups=[65400])
    if why == "device":
        box.proc.add(700, fds={9: box.dev / "nvidia0"})
    if why == "blind":
        box.proc.remove(50)
    assert refused(box, pid=501).kind == BUSY
    assert box.locks() == ids(first)[: 1 if why == "device" else 2]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"boot_id": OTHER_BOOT}, "granted"),
        ({"pid": 999}, "granted"),
        ({"node": "node2", "pid": 999}, "granted"),
        ({"node": "node2", "boot_id": OTHER_BOOT}, "granted"),
        ({"scheduler": "slurm"}, BUSY),
        ({"scheduler": "admin"}, BUSY),
        ({"add_grp_id": 0, "pid": 999}, BUSY),
        ({"namespaces": "pid:[1]", "pid": 999}, BUSY),
    ],
)
def test_a_held_device_is_taken_only_from_a_dead_owner(
    box: Box, changes: dict[str, object], kind: str
) -> None:
    ask(box, 3)
    place_lock(box.node().store, bus(3), record(**{"job_id": "7", "token": "x", **changes}))
    box.proc.shepherd(501, box.root)
    asked: dict[str, object] = {"job_id": "13", "pid": 501, "add_grp_id": 65401}
    if kind == "granted":
        assert ids(ask(box, 1, **asked)) == [bus(3)]
        reaped = any(key.startswith("reaped_") for key in totals(box))
        assert reaped or "boot_id" in changes  # what is of another boot is over at once
    else:
        assert refused(box, 1, **asked).kind == kind
        assert len(box.locks()) == 4


def test_the_same_run_that_asks_for_fewer_is_not_given_what_it_had(box: Box) -> None:
    ask(box, 2)
    again = ask(box, 1)
    assert (ids(again), again.fresh, box.locks()) == ([bus(0)], True, [bus(0)])


@pytest.mark.parametrize("other", [{"uid": 2000}, {"boot_id": OTHER_BOOT}])
def test_a_later_run_counts_of_the_same_user_in_this_boot_alone(
    box: Box, other: dict[str, object]
) -> None:
    """A job id is given again, also after slurmctld lost its state."""
    slurm: dict[str, object] = {"scheduler": "slurm", "pid": 0, "start": 0, "add_grp_id": 0}
    ask(box, 1, job_id="7", pid=999)
    later = record(**slurm, restart=2, devices=(bus(3),))
    place_lock(box.node().store, bus(3), later)
    assert refused(box, 1, **slurm).kind == BUSY
    change_record(box.node().store, bus(3), later.copy(**other))
    assert ids(ask(box, 1, **slurm)) == [bus(1)]


def test_a_second_prolog_of_a_slurm_job_is_granted_afresh(box: Box) -> None:
    """Its Prolog runs once: the job may be another of that id."""
    slurm: dict[str, object] = {"scheduler": "slurm", "pid": 0, "start": 0, "add_grp_id": 0}
    first, second = ask(box, 1, **slurm), ask(box, 1, **slurm)
    assert (second.fresh, second.owner.token != first.owner.token) == (True, True)
    assert box.locks() == [bus(0)]


def test_a_claim_of_an_earlier_boot_by_the_same_pid_and_start_is_no_claim_cut_short(
    box: Box,
) -> None:
    """Then what this run has already started would be taken for what is left of that one."""
    ask(box, 1, job_id="7", pid=999)
    place_lock(box.node().store, bus(3), record(boot_id=OTHER_BOOT, devices=(bus(3),)))
    box.proc.add(700, groups=[65400])
    assert ids(ask(box, 1)) == [bus(1)]
    assert bus(3) not in box.locks()


def test_a_refusal_tells_what_is_quarantined_from_what_is_reserved_or_in_mig_mode(box: Box) -> None:
    box.inventory(f"gpu.{bus(1)}.mig=1")
    box.node().store.check(make=True)
    boot.make_claim_folders(box.node().store, str(box.state), box.node().boot_id)
    for number, kind in ((0, quarantine.RESERVE), (2, quarantine.QUARANTINE)):
        quarantine.write_device_note(str(box.state), kind, bus(number), "root", "its fan died")
    said = refused(box, 2)
    assert "1 of 4 free (0: reserve; 1: no MIG instance; 2: quarantined; 3: free)" in said.why
    assert said.do.startswith("the job can run when enough are back in service")
    ask(box, 1)
    assert refused(box, 1, job_id="13").do == "the job can run when others have ended"


def test_a_card_that_does_not_answer_is_taken_last_and_refused_to_nobody(box: Box) -> None:
    node = box.node()
    node.store.check(make=True)
    name_suspects(box, 0, 2)
    assert ids(ask(box)) == [bus(1), bus(3)]
    assert ids(ask(box, job_id="123", pid=501)) == [bus(0), bus(2)]


def name_suspects(box: Box, *numbers: int) -> None:
    """Let gpulockd name the cards that do not answer."""
    cards = read_cards(str(box.state), box.node().boot_id)
    for number in range(4):
        cards.of(bus(number)).suspect = "GPU is lost" if number in numbers else ""
    assert save_cards(str(box.state), cards)


def test_a_slurm_job_whose_id_another_users_had_frees_nothing_of_that_one() -> None:
    mine = record(scheduler="slurm")
    held = Lock(bus(0), mine.copy(uid=1001), "")
    assert select_own_locks([held], mine) == []
