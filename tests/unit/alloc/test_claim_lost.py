# SPDX-License-Identifier: Apache-2.0
"""What somebody removes of locks and records is back before a grant, or nothing is granted."""

from __future__ import annotations

import os
import shutil

import pytest

from gpulock.alloc import claim
from gpulock.alloc.reaper import Reaper
from gpulock.alloc.release import release_locks
from gpulock.errors import UNKNOWN, Refusal
from gpulock.store import atomic, grants
from gpulock.store.locks import Lock
from tests.support.claims import ask, holder, refused
from tests.support.faults import disk_full
from tests.support.trees import Box, bus, judge_of, soon


def lose_gate_after(box: Box, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the gate be removed once claims were changed under it."""
    real = getattr(grants, name)

    def change(*args: object) -> None:
        real(*args)
        (box.records / "gate").unlink()

    monkeypatch.setattr(grants, name, change)


def test_a_claim_whose_gate_was_replaced_is_refused_and_undone(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_gate_after(box, monkeypatch, "make_claim")
    assert refused(box).kind == UNKNOWN
    assert box.locks() == []
    assert os.listdir(box.records / "claims") == []


def test_a_claim_that_fails_where_its_gate_was_replaced_says_that(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> None:
        (box.records / "gate").unlink()
        raise OSError(2, "no such folder")

    monkeypatch.setattr(grants, "make_claim", lose)
    assert "was replaced meanwhile" in refused(box).why


def test_a_release_whose_gate_was_replaced_says_so(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = ask(box, 1)
    lose_gate_after(box, monkeypatch, "release_devices")
    box.proc.remove(500)
    node = box.node()
    with pytest.raises(Refusal, match="replaced"):
        release_locks(node, lambda o: o.token == grant.owner.token, judge_of(node), soon(), "test")


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_a_claim_under_which_a_lock_is_lost_takes_no_device_of_another(
    box: Box, monkeypatch: pytest.MonkeyPatch, disk_is_full: bool
) -> None:
    """Its lock is removed after the repair: the record holds the device all the same."""
    box.proc.shepherd(500, box.root)
    token = ask(box, 4).owner.token

    def lose(reaper: Reaper, held: dict[str, Lock]) -> None:
        del reaper, held
        shutil.rmtree(box.lock / "locks" / bus(1))
        if disk_is_full:
            monkeypatch.setattr(atomic, "replace_file", disk_full)

    monkeypatch.setattr(claim, "reap_held_locks", lose)
    assert "0 of 4 free" in refused(box, 1, job_id="13", pid=501).why
    monkeypatch.undo()
    assert "0 of 4 free" in refused(box, 1, job_id="13", pid=501).why
    assert holder(box, 1).token == token


def test_where_all_records_are_lost_nothing_is_granted(box: Box) -> None:
    ask(box)
    shutil.rmtree(box.records)
    found = refused(box, 1, job_id="13", pid=501)
    assert (found.kind, "forget-locks" in found.do) == (UNKNOWN, True)
    assert refused(box).kind == UNKNOWN  # nor does the same run get others
