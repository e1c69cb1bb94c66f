# SPDX-License-Identifier: Apache-2.0
"""Shares: several owners on a card, each with a place; never beside one that holds it whole."""

from __future__ import annotations

from typing import Any

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.alloc.release import release_locks
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, Refusal
from gpulock.job import environment
from gpulock.store import quarantine
from tests.support.claims import ids
from tests.support.fake_mps import leave_mps
from tests.support.faults import refusal
from tests.support.trees import Box, bus, judging, record, soon


@pytest.fixture
def box(box: Box) -> Box:
    """A node of 4 cards: 4 places on the third, 2 on the last."""
    box.settings["SHARES"] = "2:4 3:2"
    return box


def place(card: int, number: int) -> str:
    return f"{bus(card)}.share{number}"


def take(
    box: Box,
    job: int,
    count: int = 1,
    share: bool = True,
    wanted: tuple[str, ...] = (),
    **changes: object,
) -> Grant:
    """Claim for a job of its own, whose shepherd is pid 1000 + job."""
    pid = 1000 + job
    if not (box.proc.root / str(pid)).exists():
        box.proc.shepherd(pid, box.root)
    own = {"job_id": str(job), "pid": pid, "add_grp_id": 66000 + job, **changes}
    template = record(token="", devices=(), **own)
    want, node = ClaimRequest(count, wanted, share=share), box.node()
    return claim_devices(node, template, want, judging(node), soon())


def fails(box: Box, job: int, count: int = 1, **request: Any) -> Refusal:
    return refusal(lambda: take(box, job, count, **request))


def free(box: Box, job: int) -> None:
    node = box.node()
    box.proc.remove(1000 + job)
    release_locks(node, lambda o: o.job_id == str(job), judging(node)(), soon(), "epilog")


def variables(box: Box, grant: Grant) -> dict[str, str]:
    return dict(environment.grant_variables(grant.devices, box.node().settings))


def test_shares_fill_the_fullest_card_first(box: Box) -> None:
    assert ids(take(box, 1)) == [place(2, 1)]
    assert ids(take(box, 2)) == [place(2, 2)]
    assert ids(take(box, 3, uid=1001)) == [place(3, 1)]
    assert ids(take(box, 4, uid=1001)) == [place(3, 2)]
    assert ids(take(box, 5)) == [place(2, 3)]
    assert ids(take(box, 6)) == [place(2, 4)]
    assert fails(box, 7).kind == BUSY
    free(box, 2)
    assert ids(take(box, 7)) == [place(2, 2)]
    for job in (1, 5, 6, 7):
        free(box, job)
    free(box, 4)
    assert ids(take(box, 8, uid=1001)) == [place(3, 2)], "the other card is empty"


def test_a_record_tells_into_how_many_places_the_card_was_parted(box: Box) -> None:
    grant = take(box, 1)
    found = grant.owner
    assert (found.places, found.devices, found.minors) == (4, (place(2, 1),), ("2",))
    assert variables(box, grant)["GPULOCK_SHARE"] == "1/4"
    assert variables(box, grant)["CUDA_VISIBLE_DEVICES"] == "2"


def test_several_places_are_of_one_card_and_the_mask_names_it_once(box: Box) -> None:
    take(box, 1)
    grant = take(box, 2, 3)
    assert ids(grant) == [place(2, 2), place(2, 3), place(2, 4)]
    told = variables(box, grant)
    assert (told["CUDA_VISIBLE_DEVICES"], told["GPULOCK_SHARE"]) == ("2", "3/4")
    assert told["GPULOCK_DEVICES"] == grant.devices[0].uuid


def test_one_claim_is_never_of_cards_with_unlike_numbers_of_places(box: Box) -> None:
    refusal = fails(box, 1, 5)
    assert refusal.kind == INVALID_REQUEST, "else the job waits for ever"
    assert refusal.why == "5 shares asked for, a claim gets at most 4"
    box.settings["SHARES"] = "2:4 3:4"
    take(box, 1, 2)
    grant = take(box, 2, 6)
    assert ids(grant) == [place(2, 3), place(2, 4), *[place(3, n) for n in range(1, 5)]]
    told = variables(box, grant)
    assert (told["CUDA_VISIBLE_DEVICES"], told["GPULOCK_SHARE"]) == ("2,3", "2/4,4/4")


def test_wanted_cards_give_a_place_each_or_none(box: Box) -> None:
    grant = take(box, 1, 2, wanted=(bus(2), bus(3)))
    assert ids(grant) == [place(2, 1), place(3, 1)]
    take(box, 2, wanted=(bus(3),))
    assert fails(box, 3, 2, wanted=(bus(2), bus(3))).kind == BUSY, "the last card has two places"


# --- who gets which place -------------------------------------------------------------------------


def test_who_asks_for_shares_of_quarantined_cards_is_told_to_wait_for_their_return(
    box: Box,
) -> None:
    note_out = str(box.state), quarantine.QUARANTINE
    take(box, 1, 2)
    assert fails(box, 2, 3).do == "the job can run when others have ended"
    quarantine.write_device_note(*note_out, bus(2), "root", "its fan died")
    refusal = fails(box, 2, 3)
    assert refusal.do.startswith("the job can run when enough are back in service")
    assert "2: job 1" in refusal.why
    one = fails(box, 3, 1, wanted=(bus(2),))
    assert one.do.startswith("the job can run when enough are back in service")
    assert ids(take(box, 4, 2)) == [place(3, 1), place(3, 2)], "the other card is in service"
    assert fails(box, 5, 2).do == "the job can run when others have ended"


def test_a_card_with_a_share_held_is_closed_to_whole_claims(box: Box) -> None:
    take(box, 1)
    assert ids(take(box, 2, 3, share=False)) == [bus(0), bus(1), bus(3)]
    assert fails(box, 3, share=False).kind == BUSY
    free(box, 1)
    assert ids(take(box, 3, share=False)) == [bus(2)]


def test_a_card_that_is_held_whole_is_closed_to_shares(box: Box) -> None:
    take(box, 1, share=False, wanted=(bus(2),))
    assert ids(take(box, 2)) == [place(3, 1)]
    take(box, 3)
    assert "2: job 1" in fails(box, 4).why
    free(box, 1)
    assert ids(take(box, 4)) == [place(2, 1)]


def test_whole_claims_take_cards_of_shares_last(box: Box) -> None:
    box.settings["SHARES"] = "0:4 2:2"
    granted = [ids(take(box, job, share=False)) for job in (1, 2, 3)]
    assert granted == [[bus(1)], [bus(3)], [bus(0)]]


# --- whose they are -------------------------------------------------------------------------------


def test_a_card_is_one_users_at_a_time(box: Box) -> None:
    box.settings["SHARES"] = "2:4"
    take(box, 1)
    told = fails(box, 2, uid=1001)
    assert (told.kind, "one user's at a time" in told.why) == (BUSY, True)
    free(box, 1)
    take(box, 2, uid=1001)
    assert fails(box, 3).kind == BUSY


@pytest.mark.parametrize("users", ["one", "many"])
def test_beside_an_owner_that_cannot_be_read_nobody_gets_a_place(box: Box, users: str) -> None:
    box.settings |= {"SHARES": "2:4", "SHARE_USERS": users}
    take(box, 1)
    folder = box.lock / "locks" / place(2, 2)
    folder.mkdir()
    (folder / "owner").write_text("gpulock-owner 9\n")
    assert fails(box, 2).kind == BUSY


def test_who_has_the_places_is_said_once_and_how_many_are_free(box: Box) -> None:
    take(box, 1, 2)
    take(box, 2)
    mine = fails(box, 3, 4).why
    assert mine == "4 shares asked for, 3 of 6 free (2: job 1 and job 2; 3: free)"
    other = fails(box, 3, 4, uid=1001).why
    assert ", 3 of 6 free, a card is one user's at a time (" in other
    take(box, 4, share=False, wanted=(bus(3),))
    assert ", 1 of 6 free (2: job 1 and job 2; 3: job 4)" in fails(box, 3, 2).why


@pytest.mark.parametrize(
    ("shares", "count", "wanted", "kind", "why"),
    [
        ("", 1, (), INVALID_REQUEST, "no shares of a GPU"),
        ("9:4", 1, (), INVALID_REQUEST, "no shares of a GPU"),
        ("2:4", 5, (), INVALID_REQUEST, "5 shares asked for, a claim gets at most 4"),
        ("2:4", 1, (bus(1),), INVALID_REQUEST, "GPU 1 has no shares: GPU 2 has"),
        ("3:4", 1, (), BROKEN, "1 share asked for, 0 of 4 work"),
        ("2:4 3:4", 1, (bus(3),), BROKEN, "0 of 1 work"),
        ("1:2 2:4 3:4", 5, (), BROKEN, "5 shares asked for, 4 of 8 work"),
    ],
)
def test_what_the_node_can_never_give_is_told(
    box: Box, shares: str, count: int, wanted: tuple[str, ...], kind: str, why: str
) -> None:
    (box.driver / "gpus" / bus(3) / "information").write_text("garbage\n")
    box.settings["SHARES"] = shares
    told = fails(box, 1, count, wanted=wanted)
    assert (told.kind, why in told.why) == (kind, True), told.why


@pytest.mark.parametrize(
    ("shares", "count", "kind", "why"),
    [
        ("4:4", 1, BROKEN, "1 share asked for, 0 of 4 work"),
        ("2:4 4:4", 5, BROKEN, "5 shares asked for, 4 of 8 work"),
        ("2:4 4:4", 9, INVALID_REQUEST, "9 shares asked for, a claim gets at most 8"),
    ],
)
def test_places_of_a_card_that_fell_off_the_bus_are_the_nodes_fault(
    box: Box, shares: str, count: int, kind: str, why: str
) -> None:
    box.settings |= {"SHARES": shares, "EXPECTED_GPUS": "5"}
    told = fails(box, 1, count)
    assert (told.kind, told.why) == (kind, why)


@pytest.mark.parametrize("kind", [quarantine.QUARANTINE, quarantine.RESERVE])
def test_a_card_that_is_out_of_service_gives_no_more_places(box: Box, kind: str) -> None:
    take(box, 1)
    quarantine.write_device_note(str(box.state), kind, bus(2), "root", "its fan died")
    assert ids(take(box, 2)) == [place(3, 1)]
    assert place(2, 1) in box.locks()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_while_a_place_is_held_a_card_has_as_many_as_before(
    box: Box, before: int, after: int
) -> None:
    box.settings["SHARES"] = f"2:{before}"
    take(box, 1)
    box.settings["SHARES"] = f"2:{after}"
    for job in range(2, before + 1):
        assert variables(box, take(box, job))["GPULOCK_SHARE"] == f"1/{before}"
    assert fails(box, 9).kind == BUSY
    for job in range(1, before + 1):
        free(box, job)
    assert variables(box, take(box, 9))["GPULOCK_SHARE"] == f"1/{after}"


def test_a_run_keeps_its_places_and_its_part_when_the_setting_changes(box: Box) -> None:
    first = take(box, 1, 2)
    for words in ("2:2", "2:8"):
        box.settings["SHARES"] = words
        again = take(box, 1, 2)
        assert (ids(again), again.fresh) == (ids(first), False)
        assert variables(box, again) == variables(box, first)
        assert again.owner.places == 4


def test_a_place_that_the_scheduler_counted_is_no_second_users_and_the_first_is_named(
    box: Box,
) -> None:
    box.settings |= {"SHARES": "2:4"}
    take(box, 1)
    node, want = box.node(), ClaimRequest(1, (bus(2),), share=True)
    want.counted = True
    other = record(token="", devices=(), job_id="2", pid=1002, add_grp_id=66002, uid=1001)
    box.proc.shepherd(1002, box.root)
    told = refusal(lambda: claim_devices(node, other, want, judging(node), soon()))
    assert told.why == "the job needs GPU 2, not free: 2: job 1"
    assert told.do == "see gpulock why 2"


# --- the MIG mode changes -------------------------------------------------------------------------


def in_mig_mode(card: int) -> tuple[str, ...]:
    """Return what an inventory says of a card with one instance."""
    name = f"mig.{bus(card)}.gi1.ci0"
    return f"gpu.{bus(card)}.mig=1", f"{name}.uuid=MIG-a", f"{name}.profile=3g.40gb"


def test_while_a_place_is_held_nobody_gets_an_instance_of_its_card(box: Box) -> None:
    take(box, 1)
    box.inventory(*in_mig_mode(2))
    instance = f"{bus(2)}.gi1.ci0"
    assert fails(box, 2, share=False, wanted=(instance,)).kind == BUSY
    assert box.locks() == [place(2, 1)]
    free(box, 1)
    assert ids(take(box, 2, share=False, wanted=(instance,))) == [instance]


def test_a_card_in_mig_mode_gives_no_more_places(box: Box) -> None:
    box.settings["SHARES"] = "2:4"
    take(box, 1)
    box.inventory(*in_mig_mode(2))
    for job in (1, 2):
        assert "no shares of a GPU" in fails(box, job).why
    assert box.locks() == [place(2, 1)]


def test_while_an_instance_is_held_nobody_gets_a_place_on_its_card(box: Box) -> None:
    box.settings["SHARES"] = "2:4"
    box.inventory(*in_mig_mode(2))
    take(box, 1, share=False, wanted=(f"{bus(2)}.gi1.ci0",))
    box.inventory()
    assert fails(box, 2).kind == BUSY
    free(box, 1)
    assert ids(take(box, 2)) == [place(2, 1)]


def test_a_refusal_names_the_mps_that_ends_on_a_card(box: Box) -> None:
    leave_mps(box.node(), bus(2), 1001)
    take(box, 1, 3, share=False)
    whole = fails(box, 2, share=False)
    assert "2: MPS of uid 1001 ends on it" in whole.why
    assert "quarantined" not in whole.why
    assert whole.do == "the job can run when others have ended"
    other = fails(box, 3, 1, uid=1002)
    assert "2: MPS of uid 1001 ends on it" in other.why
    assert ids(take(box, 4, 1, uid=1001)) == [place(2, 1)]


# --- a card whose MPS ends ------------------------------------------------------------------------


def test_no_place_is_confined_beside_an_mps_that_was_started_before_isolation(box: Box) -> None:
    box.settings["ISOLATION"] = "cgroup"
    leave_mps(box.node(), bus(2), 0)
    assert "2: MPS of uid 0 ends on it" in fails(box, 1, 3, uid=0).why
