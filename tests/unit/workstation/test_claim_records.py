# SPDX-License-Identifier: Apache-2.0
"""A claim of a process whose LOCK_DIR is lost before its record is kept is none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.errors import UNKNOWN, Refusal
from gpulock.store import claim_records
from gpulock.store.owner import Owner
from gpulock.workstation.process_claims import claim_for_process, make_process_owner
from tests.support.trees import Box, bus, judge_of, soon


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node on which one process runs."""
    made = Box(tmp_path)
    made.proc.add(900)
    return made


def claim(box: Box, count: int = 2) -> Grant:
    node = box.node()
    return claim_for_process(
        node, make_process_owner(node, 900, "alice"), ClaimRequest(count), soon()
    )


def lose_before_the_record(box: Box, patch: pytest.MonkeyPatch, what: Path) -> None:
    """Lose a part of LOCK_DIR just before a record is written; gpulockd is at once there."""
    real = claim_records.write_claim_record

    def lose(state_dir: str, record: Owner) -> str:
        shutil.rmtree(what)
        if what == box.lock:
            node = box.node()
            reconcile_locks(node, judge_of(node), soon())
        return real(state_dir, record)

    patch.setattr(claim_records, "write_claim_record", lose)


def test_a_claim_whose_lock_dir_was_adopted_without_it_is_refused(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_before_the_record(box, monkeypatch, box.lock)
    with pytest.raises(Refusal) as caught:
        claim(box)
    assert caught.value.kind == UNKNOWN
    assert (box.locks(), os.listdir(box.state / "runs")) == ([], [])


def test_what_is_left_of_a_claim_with_a_lost_lock_is_released(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(box, 1)
    box.proc.add(901)
    lose_before_the_record(box, monkeypatch, box.lock / "locks" / bus(1))
    node = box.node()
    with pytest.raises(Refusal):
        claim_for_process(node, make_process_owner(node, 901, "bob"), ClaimRequest(2), soon())
    assert box.locks() == [bus(0)]
    assert len(os.listdir(box.state / "runs")) == 1


def test_the_earlier_grant_of_a_process_that_asks_again_stays(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = claim(box).owner.token
    lose_before_the_record(box, monkeypatch, box.lock / "locks" / bus(1))
    with pytest.raises(Refusal):
        claim(box)
    monkeypatch.undo()
    assert os.listdir(box.state / "runs") == [token]
    node = box.node()
    reconcile_locks(node, judge_of(node), soon())
    assert box.locks() == [bus(0), bus(1)]
