# SPDX-License-Identifier: Apache-2.0
"""Release by owner: one's own run, as often as one likes, and only when all is quiet."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.release import ReleaseResult, release_locks
from gpulock.deadline import Deadline
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock, LockStore
from gpulock.store.owner import Owner
from tests.support.faults import raising
from tests.support.locks import change_record
from tests.support.trees import Box, bus, judge_of, judging, record, soon

GID = 65400


def hold(box: Box, count: int = 2, **changes: object) -> Owner:
    node = box.node()
    one = record(token="", devices=(), **changes)
    return claim_devices(node, one, ClaimRequest(count), judging(node), soon()).owner


def of_run(one: Owner) -> Callable[[Owner], bool]:
    return lambda found: (found.key(), found.run()) == (one.key(), one.run())


def let_go(box: Box, one: Owner, seconds: float = 5) -> ReleaseResult:
    node = box.node()
    return release_locks(node, of_run(one), judge_of(node), Deadline(seconds), "epilog")


def test_a_release_where_nothing_was_ever_claimed_makes_nothing(box: Box) -> None:
    assert let_go(box, record()).freed == []
    assert not box.lock.exists()


def test_a_process_that_is_left_keeps_the_lock_draining(box: Box) -> None:
    one = hold(box)
    box.proc.add(700, groups=[GID])
    found = let_go(box, one)
    assert [name for name, _ in found.kept] == box.locks() == [bus(0), bus(1)]
    assert all("700" in why for _, why in found.kept)
    for lock in box.node().store.read_detailed_locks().values():
        assert lock.owner is not None and lock.owner.draining == 1


def test_what_is_left_is_looked_for_before_the_gate_and_among_the_owners_alone(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody waits at the gate; and who else hides or forks keeps no lock of the owner's."""
    one, done = hold(box), list[str]()
    box.proc.add(700, groups=[GID])

    def noting(kind: type, name: str, word: str) -> None:
        real = getattr(kind, name)

        def noted(*words: object) -> object:
            done.append(f"{word} {words[1]}" if name == "restrict" else word)
            return real(*words)

        monkeypatch.setattr(kind, name, noted)

    noting(ProcessScan, "restrict", "restrict")
    noting(OpenFiles, "_fill", "files")
    noting(Judge, "job_processes", "processes")
    noting(Gate, "__enter__", "gate")
    let_go(box, one)
    before = done[: done.index("gate")]
    assert before[0] == "restrict {1000: 'alice'}"
    assert {"files", "processes"} < set(before)


def test_a_rename_that_fails_leaves_each_lock_and_says_why(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = hold(box)
    monkeypatch.setattr(os, "rename", raising(OSError(errno.EROFS, "read-only file system")))
    kept = let_go(box, one).kept
    assert [why for _, why in kept] == ["it cannot be freed: [Errno 30] read-only file system"] * 2
    assert len(box.node().store.read_all_locks()) == 2


def test_a_lock_that_is_another_claims_by_now_is_not_marked_as_released(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = hold(box, 1)
    box.proc.add(700, groups=[GID])
    store = box.node().store
    held = store.read_all_locks()
    change_record(store, bus(0), one.copy(token="another", job_id="13"))

    def as_before(_: LockStore) -> dict[str, Lock]:
        return held

    monkeypatch.setattr(LockStore, "read_all_locks", as_before)
    found = let_go(box, one)
    assert (found.freed, found.kept) == ([], [])
    owner = store.read(bus(0)).owner
    assert owner is not None
    assert (owner.token, owner.job_id, owner.draining) == ("another", "13", 0)


def test_of_a_job_with_a_group_the_session_proves_nothing(box: Box) -> None:
    """Its shepherd's session has what other jobs of this execd left, and the shepherd itself."""
    one = hold(box, sid=300)
    box.proc.add(700, session=300)
    assert let_go(box, one).freed == [bus(0), bus(1)]
