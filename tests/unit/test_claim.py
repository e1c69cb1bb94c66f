# SPDX-License-Identifier: Apache-2.0
"""A claim: all devices or none, the same answer for the same run, nothing from a living owner."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpulock import kv, quarantine
from gpulock.claim import claim
from gpulock.deadline import Deadline
from gpulock.gate import Gate
from gpulock.grant import Grant
from gpulock.liveness import Judge
from gpulock.owner import Owner
from gpulock.refusal import BROKEN, BUSY, SENSELESS, UNKNOWN, Refusal
from tests.unit.trees import BOOT, NAME, OTHER_BOOT, Box, bus, judging, record, soon


@pytest.fixture
def box(tmp_path: Path) -> Box:
    made = Box(tmp_path)
    made.proc.execd(tmp_path)
    made.proc.shepherd(500, tmp_path)
    return made


def never() -> Judge:
    pytest.fail("nothing had to be settled")


def ask(box: Box, count: int = 2, **changes: object) -> Grant:
    node = box.node()
    return claim(node, record(token="", devices=(), **changes), count, judging(node), soon())


def pick(box: Box, device: str, job_id: str = "12") -> Grant:
    node = box.node()
    one = record(token="", devices=(), job_id=job_id)
    return claim(node, one, 1, judging(node), soon(), (device,))


def refused(box: Box, count: int = 2, **changes: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        ask(box, count, **changes)
    return caught.value


def ids(grant: Grant) -> list[str]:
    return [device.id for device in grant.devices]


def holder(box: Box, number: int) -> Owner:
    found = box.node().store.read(bus(number)).owner
    assert found is not None
    return found


def totals(box: Box) -> dict[str, str]:
    return kv.decode((box.lock / "totals").read_text())


def test_a_claim_locks_what_it_grants_and_nothing_else(box: Box) -> None:
    node = box.node()
    grant = claim(node, record(token="", devices=()), 2, never, soon())
    assert ids(grant) == box.locks() == [bus(0), bus(1)]
    assert grant.fresh
    for number in (0, 1):
        found = holder(box, number)
        assert (found.devices, found.token) == ((bus(0), bus(1)), grant.owner.token)
        assert found.uuid == grant.devices[number].uuid
        assert found.claimed_at > 0 < found.claimed_boottime
    assert len(grant.owner.token) == 16
    assert (totals(box)["claims_granted"], "gate_wait_seconds" in totals(box)) == ("1", True)


def test_another_job_gets_other_devices(box: Box) -> None:
    first, second = ask(box), ask(box, job_id="123", pid=501)
    assert not set(ids(first)) & set(ids(second))
    assert first.owner.token != second.owner.token
    box.proc.shepherd(501, box.root)
    assert refused(box, 1, job_id="1234", pid=502).kind == BUSY
    assert totals(box)["claims_busy"] == "1"


def test_the_same_run_gets_the_same_answer(box: Box) -> None:
    first = ask(box)
    node = box.node()
    again = claim(node, record(token="", devices=()), 2, never, soon())
    assert (ids(again), again.owner.token) == (ids(first), first.owner.token)
    assert (first.fresh, again.fresh) == (True, False)


def test_part_of_a_grant_is_given_up_and_claimed_afresh(box: Box) -> None:
    first = ask(box)
    shutil.rmtree(box.lock / "locks" / bus(0))
    again = ask(box)
    assert (len(again.devices), again.fresh) == (2, True)
    assert again.owner.token != first.owner.token
    assert box.locks() == sorted(ids(again))


def test_part_of_a_grant_that_somebody_uses_is_not_given_up(box: Box) -> None:
    ask(box)
    shutil.rmtree(box.lock / "locks" / bus(0))
    box.proc.add(700, fds={9: box.dev / "nvidia1"})
    assert refused(box).kind == BUSY
    assert box.locks() == [bus(1)]


def test_a_grant_that_is_being_released_is_not_given_again(box: Box) -> None:
    first = ask(box)
    store = box.node().store
    for number in (0, 1):
        store.rewrite(bus(number), holder(box, number).copy(settling=1))
    assert ask(box).owner.token != first.owner.token


def test_an_earlier_run_that_is_dead_is_freed(box: Box) -> None:
    first = ask(box)
    box.proc.shepherd(500, box.root, start=2000)
    second = ask(box, start=2000)
    assert second.owner.token != first.owner.token
    assert box.locks() == sorted(ids(second))


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
    assert box.locks() == ids(first)


def test_another_uid_with_the_same_key_and_run_gets_no_others_grant(box: Box) -> None:
    first = ask(box)
    again = ask(box, uid=1001)
    assert again.owner.token != first.owner.token
    assert again.owner.uid == 1001


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"boot_id": OTHER_BOOT}, "granted"),
        ({"pid": 999}, "granted"),
        ({"node": "node2"}, BUSY),
        ({"node": "node2", "boot_id": OTHER_BOOT}, BUSY),
        ({"scheduler": "slurm"}, BUSY),
        ({"scheduler": "admin"}, BUSY),
        ({"add_grp_id": 0, "pid": 999}, BUSY),
        ({"pid_ns": "pid:[1]", "pid": 999}, BUSY),
    ],
)
def test_a_held_device_is_taken_only_from_a_dead_owner(
    box: Box, changes: dict[str, object], kind: str
) -> None:
    ask(box, 3)
    box.node().store.make(bus(3), record(**{"job_id": "7", "token": "x", **changes}))
    box.proc.shepherd(501, box.root)
    asked: dict[str, object] = {"job_id": "13", "pid": 501, "add_grp_id": 65401}
    if kind == "granted":
        assert ids(ask(box, 1, **asked)) == [bus(3)]
        assert any(key.startswith("reaped_") for key in totals(box))
    else:
        assert refused(box, 1, **asked).kind == kind
        assert len(box.locks()) == 4


def test_an_unknown_version_is_held(box: Box) -> None:
    ask(box, 3)
    (box.lock / "locks" / bus(3)).mkdir()
    (box.lock / "locks" / bus(3) / "owner").write_text("gpulock-owner 9\nboot_id=x\n")
    assert refused(box, 1, job_id="13").kind == BUSY


def test_a_claim_cut_short_is_settled_only_when_devices_are_short(box: Box) -> None:
    ask(box, 1)
    (box.lock / "locks" / bus(3)).mkdir()
    ask(box, 2, job_id="13")
    assert len(box.locks()) == 4
    assert ids(ask(box, 1, job_id="14")) == [bus(3)]
    assert totals(box)["reaped_cut_short"] == "1"


def test_a_wanted_device_is_the_one_that_is_given(box: Box) -> None:
    assert ids(pick(box, bus(2))) == [bus(2)]
    for device, kind in ((bus(2), BUSY), ("0000:ff:00.0", SENSELESS)):
        with pytest.raises(Refusal) as caught:
            pick(box, device, "13")
        assert caught.value.kind == kind


def test_quarantined_and_reserved_devices_are_left_out(box: Box) -> None:
    ask(box, 1)
    quarantine.put(str(box.state), quarantine.QUARANTINE, bus(1), "root", "ECC")
    quarantine.put(str(box.state), quarantine.RESERVES, bus(2), "root", "tests")
    assert ids(ask(box, 1, job_id="13")) == [bus(3)]
    assert refused(box, 1, job_id="14").kind == BUSY


def test_a_card_is_not_given_beside_its_own_instance_nor_the_reverse(box: Box) -> None:
    pick(box, bus(3))
    (box.lock / "locks" / f"{bus(0)}.gi1.ci0").mkdir()
    quarantine.put(str(box.state), quarantine.QUARANTINE, f"{bus(1)}.gi1.ci0", "root", "ECC")
    box.inventory(f"gpu.{bus(3)}.mig=1", f"mig.{bus(3)}.gi1.ci0.uuid=MIG-a")
    assert [d.id for d in box.node().devices()][3] == f"{bus(3)}.gi1.ci0"
    assert ids(ask(box, 1, job_id="13")) == [bus(2)]


def test_fewer_gpus_than_expected_is_the_nodes_fault_and_too_many_is_the_users(box: Box) -> None:
    box.settings["GPUS"] = "6"
    assert refused(box, 5).kind == BROKEN
    assert refused(box, 6).kind == BROKEN
    assert refused(box, 7).kind == SENSELESS
    assert len(ask(box, 4).devices) == 4


@pytest.mark.parametrize("count", [0, -1, -(10**30)])
def test_a_count_that_is_none_locks_nothing(box: Box, count: int) -> None:
    with pytest.raises(Refusal):
        ask(box, count)
    assert box.locks() == []


def test_a_card_that_cannot_be_read_is_not_granted(box: Box) -> None:
    (box.driver / "gpus" / bus(0) / "information").write_text("garbage")
    assert ids(ask(box, 3)) == [bus(1), bus(2), bus(3)]
    assert refused(box, 4, job_id="13").kind == BROKEN


def test_what_may_refuse_at_the_end_leaves_no_lock(box: Box) -> None:
    node = box.node()

    def no(_: object) -> None:
        raise Refusal(UNKNOWN, "no UUID", "wait")

    with pytest.raises(Refusal):
        claim(node, record(token=""), 2, never, soon(), check=no)
    assert box.locks() == []


def test_locks_lost_within_the_boot_grant_nothing(box: Box) -> None:
    ask(box)
    shutil.rmtree(box.lock)
    assert refused(box, job_id="13").kind == UNKNOWN
    assert box.locks() == []


def test_after_locks_were_lost_a_device_in_use_is_left_out(box: Box) -> None:
    ask(box, 1)
    (box.lock / "lost").touch()
    box.proc.add(700, fds={9: box.dev / "nvidia1"})
    assert ids(ask(box, 1, job_id="13")) == [bus(2)]


def test_unknowns_of_three_jobs_of_two_users_are_a_broken_node(box: Box) -> None:
    ask(box)
    shutil.rmtree(box.lock)
    asked = [("13", "alice"), ("13", "alice"), ("14", "alice"), ("15", "alice"), ("16", "bob")]
    kinds = [refused(box, job_id=job, user=user).kind for job, user in asked]
    assert kinds == [UNKNOWN] * 4 + [BROKEN]


def test_a_success_ends_the_streak(box: Box) -> None:
    (box.state / "boot_id").write_text(BOOT)
    for job, user in (("13", "alice"), ("14", "bob")):
        assert refused(box, job_id=job, user=user).kind == UNKNOWN
    (box.state / "boot_id").unlink()
    ask(box)
    (box.lock / "boot_id").unlink()
    assert refused(box, job_id="15", user="eve").kind == UNKNOWN


def test_a_gate_that_stays_shut_is_counted_by_the_next_who_gets_in(box: Box) -> None:
    ask(box, 1)
    node = box.node()
    with Gate(str(box.lock), Deadline(1)):
        with pytest.raises(Refusal) as caught:
            claim(node, record(job_id="13"), 1, never, Deadline(0.02))
        assert caught.value.kind == UNKNOWN
        assert (box.lock / "timeouts").read_bytes() == b"."
    ask(box, 1, job_id="13")
    assert totals(box)["gate_timeouts"] == "1"
    assert not (box.lock / "timeouts").exists()


def test_a_lock_directory_that_is_not_private_grants_nothing(box: Box) -> None:
    ask(box, 1)
    box.lock.chmod(0o777)
    assert refused(box, 1, job_id="13").kind == BROKEN


def test_a_job_whose_number_begins_like_another_is_another_job(box: Box) -> None:
    first, second = ask(box, 1, job_id="12"), ask(box, 1, job_id="123", pid=501)
    third = ask(box, 1, job_id="12", task_id="3", pid=502)
    assert len({ids(first)[0], ids(second)[0], ids(third)[0]}) == 3


def test_the_node_in_a_record_is_this_one(box: Box) -> None:
    assert ask(box).owner.node == NAME
    assert os.path.isdir(box.lock / "locks" / bus(0))
