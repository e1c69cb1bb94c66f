# SPDX-License-Identifier: Apache-2.0
"""Tasks of one job on this host share what it holds here, and each keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.alloc.same_job import whole_grant
from gpulock.errors import BUSY, Refusal
from gpulock.node.devices import Device
from gpulock.store.locks import Lock, LockStore
from tests.support.faults import disk_full, refusal
from tests.support.locks import change_record
from tests.support.trees import Box, bus, judging, record, soon

FIRST, SECOND, THIRD = 600, 601, 602


@pytest.fixture
def box(tmp_path: Path) -> Box:
    made = Box(tmp_path)
    made.proc.execd(tmp_path)
    return made


def task(box: Box, pid: int, **changes: object) -> Grant:
    """Let a task with shepherd `pid` and group 65000 + pid ask for two devices."""
    box.proc.shepherd(pid, box.root)
    node = box.node()
    one = record(token="", devices=(), pid=pid, add_grp_id=65000 + pid, **changes)
    return claim_devices(node, one, ClaimRequest(2, join=True), judging(node), soon())


def test_a_task_after_the_first_has_ended_shares_what_the_second_keeps(box: Box) -> None:
    first = task(box, FIRST)
    task(box, SECOND)
    box.proc.remove(FIRST)
    assert task(box, THIRD).owner.token == first.owner.token


def test_a_task_after_all_have_ended_claims_afresh(box: Box) -> None:
    first = task(box, FIRST)
    box.proc.remove(FIRST)
    again = task(box, SECOND)
    assert (again.fresh, again.owner.token == first.owner.token) == (True, False)
    assert len(box.locks()) == 2


def test_a_task_does_not_share_with_an_owner_that_cannot_be_judged(box: Box) -> None:
    task(box, FIRST)
    box.proc.remove(FIRST)
    box.proc.remove(50)
    assert refusal(lambda: task(box, SECOND)).kind == BUSY


def test_another_users_job_of_that_number_is_not_joined(box: Box) -> None:
    task(box, FIRST)
    with pytest.raises(Refusal):
        task(box, SECOND, uid=1001)


def test_a_grant_that_is_being_released_is_not_joined(box: Box) -> None:
    task(box, FIRST)
    store = box.node().store
    for name, lock in store.read_all_locks().items():
        assert lock.owner is not None
        change_record(store, name, lock.owner.copy(draining=1))
    box.proc.add(700, groups=[65000 + FIRST])
    with pytest.raises(Refusal):
        task(box, SECOND)


@pytest.mark.parametrize(
    ("held", "whole"),
    [
        ([(0, "a"), (1, "a")], True),
        ([(0, "a")], False),  # the other one was freed already
        ([(0, "a"), (1, "b")], False),
        ([(0, "a"), (1, "a"), (2, "b")], False),
        ([(0, "a"), (9, "a")], False),  # that card is not there
    ],
)
def test_a_grant_is_whole_with_all_its_devices_and_no_other_claim(
    held: list[tuple[int, str]], whole: bool
) -> None:
    found = [Device(bus(number), number) for number in range(4)]
    one = record(devices=(bus(0), bus(9) if (9, "a") in held else bus(1)))
    locks = [Lock(bus(number), one.copy(token=token), "") for number, token in held]
    granted = whole_grant(locks, found)
    assert [device.id for device in granted] == ([bus(0), bus(1)] if whole else [])


def test_a_task_that_cannot_be_noted_is_refused(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    task(box, FIRST)
    monkeypatch.setattr(LockStore, "anchor", disk_full)
    with pytest.raises(Refusal, match=r"the job's claim cannot be joined: .*No space left"):
        task(box, SECOND)
