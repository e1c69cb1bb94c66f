# SPDX-License-Identifier: Apache-2.0
"""One look at all processes: what it may have missed is said, and no more is said than that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.alloc import process_scan
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import Proc
from tests.support.faults import raising
from tests.support.trees import FakeProc

HERE, GONE = 64_001, 64_002  # users


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


def look(proc: FakeProc) -> ProcessScan:
    return ProcessScan(Proc(str(proc.root)))


def test_a_look_that_ran_out_of_time_is_partial_and_blind(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_scan, "LONGEST", -1.0)
    scan = look(proc)
    scan.statuses()
    assert scan.partial
    assert "no time for process" in scan.why_blind_about(1000)


def test_a_user_is_somebodys_subordinate_uid_alone_by_what_the_kernel_says(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root nothing is hidden, but by a kernel that hides it from root as well."""
    denied = PermissionError(13, "denied")
    monkeypatch.setattr(Proc, "namespace_owner", raising(denied))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(PermissionError):
        look(proc).account(700, 3_000_005)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert look(proc).account(700, 3_000_005) == 3_000_005


def test_a_user_with_a_process_is_asked_about_once_and_one_without_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel goes through all processes to answer for a user who has one."""
    asked: list[int] = []

    def getpriority(_: int, uid: int) -> int:
        asked.append(uid)
        if uid == GONE:
            raise ProcessLookupError
        return 0

    monkeypatch.setattr(os, "getpriority", getpriority)
    scan = ProcessScan(Proc())
    scan.restrict({GONE: "gone", HERE: "here"})
    assert [scan.may_run(uid) for uid in (HERE, HERE, GONE, GONE)] == [True, True, False, False]
    assert asked == [HERE, GONE, GONE]


@pytest.mark.parametrize("unread", ["subuid", "nsswitch"])
def test_where_the_files_of_subordinate_uids_cannot_be_read_anybody_may_have_some(
    tmp_path: Path, unread: str
) -> None:
    paths = {name: str(tmp_path / name) for name in ("subuid", "nsswitch")}
    assert not process_scan.may_have_subordinate_uids(1000, "alice", **paths)
    (tmp_path / unread).mkdir()
    assert process_scan.may_have_subordinate_uids(1000, "alice", **paths)
