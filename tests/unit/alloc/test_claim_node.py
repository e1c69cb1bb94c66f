# SPDX-License-Identifier: Apache-2.0
"""A claim and the node: what it can give now, what it never can, and when it is broken."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from gpulock.alloc import streaks
from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices, count_unknown_refusal
from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.store import quarantine
from gpulock.store.gate import Gate
from tests.support.claims import ask, ids, never, pick, refused
from tests.support.faults import raising, refusal
from tests.support.trees import BOOT, Box, bus, record, soon


def test_a_wanted_device_is_the_one_that_is_given(box: Box) -> None:
    assert ids(pick(box, bus(2))) == [bus(2)]
    assert refusal(lambda: pick(box, bus(2), "13")).kind == BUSY
    assert refusal(lambda: pick(box, "0000:ff:00.0", "13")).kind == INVALID_REQUEST


def test_fewer_gpus_than_expected_is_the_nodes_fault_and_too_many_is_the_users(box: Box) -> None:
    box.settings["EXPECTED_GPUS"] = "6"
    assert refused(box, 5).kind == BROKEN
    assert refused(box, 6).kind == BROKEN
    assert refused(box, 7).kind == INVALID_REQUEST
    assert len(ask(box, 4).devices) == 4


def test_a_faulty_card_asked_for_by_id_sends_the_job_back_and_breaks_no_node(box: Box) -> None:
    (box.driver / "gpus" / bus(0) / "information").write_text("")
    with pytest.raises(Refusal) as caught:
        pick(box, bus(0))
    assert (caught.value.kind, refused(box, 4).kind) == (UNKNOWN, BROKEN)
    assert caught.value.why.startswith("GPU 0: ") and "here" not in caught.value.why
    assert refusal(lambda: pick(box, "0000:ff:00.0")).kind == INVALID_REQUEST


@pytest.mark.parametrize("count", [0, -1, -(10**30)])
def test_a_count_that_is_none_locks_nothing(box: Box, count: int) -> None:
    with pytest.raises(Refusal):
        ask(box, count)
    assert box.locks() == []


def test_a_card_that_cannot_be_read_is_not_granted(box: Box) -> None:
    (box.driver / "gpus" / bus(0) / "information").write_text("garbage")
    assert refused(box, 4, job_id="13").kind == BROKEN
    assert ids(ask(box, 1)) == [bus(1)]
    assert ids(ask(box, 2, job_id="13")) == [bus(2), bus(3)]


def test_a_node_that_is_full_is_not_broken_however_many_ask(box: Box) -> None:
    box.proc.shepherd(500, box.root)
    ask(box, 4)
    asked = [(str(number), f"user{number}") for number in range(20, 26)]
    kinds = [refused(box, 1, job_id=job, user=user).kind for job, user in asked]
    assert kinds == [BUSY] * 6


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "the gate's file"), MemoryError()])
def test_an_unknown_is_told_as_it_is_where_counting_it_fails(
    box: Box, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """Python ends with 1 for an exception in a hook: the queue, or the node, would be stopped."""
    ask(box, 1)
    refusal = Refusal(UNKNOWN, "the spool cannot be read", "wait")
    node = box.node()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", raising(fault))
        count_unknown_refusal(node, refusal, record(), soon())
    assert refusal.kind == UNKNOWN


def test_unknowns_of_three_jobs_of_two_users_are_a_broken_node(box: Box) -> None:
    ask(box)
    shutil.rmtree(box.records)
    asked = [("13", "alice"), ("13", "alice"), ("14", "alice"), ("15", "alice"), ("16", "bob")]
    kinds = [refused(box, job_id=job, user=user).kind for job, user in asked]
    assert kinds == [UNKNOWN] * 4 + [BROKEN]


def test_a_gate_shut_for_jobs_of_several_owners_is_a_broken_node(box: Box) -> None:
    """Otherwise Grid Engine starts job after job there for ever."""
    ask(box, 1)
    asked = [("13", "alice"), ("13", "alice"), ("14", "alice"), ("15", "alice"), ("16", "bob")]
    kinds: list[str] = []
    with Gate(str(box.records), Deadline(1)):
        for job, user in asked:
            with pytest.raises(Refusal) as caught:
                one = record(job_id=job, user=user)
                claim_devices(box.node(), one, ClaimRequest(1), never, Deadline(0.01))
            kinds.append(caught.value.kind)
    assert kinds == [UNKNOWN] * 4 + [BROKEN]


@pytest.mark.parametrize("lost", ["all", "quarantine", "folder"])
def test_a_state_dir_emptied_within_a_boot_is_made_again_and_told(box: Box, lost: str) -> None:
    """`rm -rf /var/lib/gpulock/*`: nobody knows any more what was out of service."""
    ask(box, 1)
    shutil.rmtree(box.state / "quarantine")
    if lost != "quarantine":
        shutil.rmtree(box.state)
    if lost == "all":
        box.state.mkdir()

    told = refused(box, 1, job_id="13")

    assert (told.kind, f"{box.state}/quarantine was lost" in told.why) == (UNKNOWN, True)
    assert (box.state / quarantine.LOST_MARK).exists()
    assert (box.state / "boot_id").read_text() == f"{BOOT}\n"
    assert ids(ask(box, 1, job_id="13")) == [bus(1)]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *[(one, UNKNOWN) for one in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE)],
        *[(one, UNKNOWN) for one in (errno.ENFILE, errno.ENOENT)],
        *[(one, BROKEN) for one in (errno.EROFS, errno.EIO, errno.EACCES)],
    ],
)
@pytest.mark.parametrize("place", ["mkdir", "rename", "open"])
def test_what_users_can_cause_breaks_no_node(
    box: Box, monkeypatch: pytest.MonkeyPatch, place: str, number: int, kind: str
) -> None:
    """A full /run put queue after queue into error while status said that all GPUs were free."""
    ask(box, 1)
    real = getattr(os, place)

    def fail(path: object, *more: object, **named: object) -> object:
        if place == "open" and not str(path).startswith(f"{box.lock}/locks/"):
            return real(path, *more, **named)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, place, fail)
    assert refused(box, 1, job_id="13").kind == kind
    monkeypatch.undo()
    assert box.locks() == [bus(0)]


def test_where_nobody_can_say_what_came_before_an_unknown_stays_one(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(box)
    (box.records / "claims/x").mkdir()
    (box.records / "claims/x/record").write_text("garbage")
    monkeypatch.setattr(streaks, "read_events", raising(OSError(errno.EIO, "broken")))
    kinds = {refused(box, 1, job_id=str(job), user=f"u{job}").kind for job in range(20, 26)}
    assert kinds == {UNKNOWN}


def test_a_folder_of_notes_that_is_no_folder_is_not_made_again(box: Box) -> None:
    ask(box)
    quarantined = box.state / quarantine.FOLDER
    quarantined.rmdir()
    quarantined.write_text("")
    assert refused(box, 1, job_id="20").kind == BROKEN
    assert quarantined.is_file()


def test_a_card_in_mig_mode_of_which_no_instance_is_known_is_not_granted(box: Box) -> None:
    box.inventory(f"gpu.{bus(0)}.mig=1")
    assert ids(ask(box, 1)) == [bus(1)]
