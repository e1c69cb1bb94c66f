# SPDX-License-Identifier: Apache-2.0
"""One look at all processes: what it may have missed is said, and no more is said than that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulock.alloc import process_scan
from gpulock.alloc.process_scan import ProcessScan, is_root_program
from gpulock.node.procfs import Proc
from tests.support.faults import raising, returning
from tests.support.trees import FakeProc

HERE, GONE = 64_001, 64_002  # users


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


def test_what_was_not_seen_stays_the_reason_of_a_look_that_never_comes_to_rest(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_scan, "ROUNDS", 1)
    scan = look(proc)
    scan.statuses()
    assert (scan.restless, "faster than" in scan.blind) == (True, True)
    proc.add(700)
    (proc.root / "700/status").write_text("garbage")
    scan = look(proc)
    scan.statuses()
    assert (scan.restless, "process 700 cannot be seen" in scan.blind) == (False, True)


def test_who_has_no_process_is_not_the_one_who_forks(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.add(700, uids=(0, 0, 0, 0))
    numbers = iter((699, 700))
    monkeypatch.setattr(process_scan, "SAMPLES", 1)
    monkeypatch.setattr(Proc, "last_pid", lambda _: next(numbers))
    scan = look(proc)
    scan.blind, scan.restless = "processes came and went", True
    assert scan.why_blind_about(HERE) == scan.blind
    monkeypatch.setattr(ProcessScan, "may_run", returning(False))
    assert scan.why_blind_about(HERE) == ""


def test_a_process_of_a_user_who_is_not_asked_for_is_not_read(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat_result((0, 0, 0, 0, GONE, 0, 0, 0, 0, 0))
    scan = look(proc)
    monkeypatch.setattr(os, "stat", returning(stat))
    monkeypatch.setattr(Proc, "namespace_owner", returning(0))
    assert not scan.is_process_of(700, HERE)


def owned(
    monkeypatch: pytest.MonkeyPatch, uids: dict[int, int], met: Callable[[int], None] | None = None
) -> None:
    """Let folders of processes be of these users; `met` is called where one is asked for."""
    real = os.stat

    def stat(path: str, **keys: Any) -> os.stat_result:
        name = str(path).rpartition("/")[2]
        if not (name.isdigit() and int(name) in uids):
            return real(path, **keys)
        if met:
            met(int(name))
        return os.stat_result((0, 0, 0, 0, uids[int(name)], 0, 0, 0, 0, 0))

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(Proc, "namespace_owner", returning(0))


def test_a_look_for_a_user_leaves_out_all_but_the_systems(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (700, 701, 702):
        proc.add(pid)
    owned(monkeypatch, {700: GONE, 701: HERE, 702: 0})
    scan = look(proc)
    scan.restrict({HERE: "here"})
    assert {700, 701, 702} & set(scan.statuses()) == {701, 702}


def test_one_that_is_gone_before_it_is_known_whose_it_was_is_not_left_out(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been the user's, with a child behind the place that the listing had reached."""

    def met(pid: int) -> None:
        proc.add(pid + 1)
        if pid == 701:
            proc.remove(pid)
            raise FileNotFoundError(pid)

    proc.add(700)
    owned(monkeypatch, {700: HERE, 701: HERE}, met)
    scan = look(proc)
    scan.restrict({HERE: "here"})
    assert 702 in scan.statuses()


@pytest.mark.parametrize(("account", "forks"), [(HERE, True), (GONE, False)])
def test_who_forks_is_told_by_the_newest_process_that_is_there_and_its_account(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch, account: int, forks: bool
) -> None:
    """Many numbers are of no process any more, and a subordinate uid is its user's."""
    proc.add(700, uids=(3_000_005,) * 4)
    monkeypatch.setattr(process_scan, "SAMPLES", 1)
    monkeypatch.setattr(process_scan, "ENOUGH", 1)
    numbers = iter((699, 701))
    monkeypatch.setattr(Proc, "last_pid", lambda _: next(numbers))
    monkeypatch.setattr(Proc, "namespace_owner", returning(account))
    assert look(proc).may_fork(HERE) is forks


def test_programs_that_may_not_be_seen_are_believed(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = ProcessScan(Proc(str(proc.root)))
    assert tree.sees_all() and tree.sees_all()
    monkeypatch.setattr(Proc, "link", raising(PermissionError(13, "denied")))
    assert is_root_program(tree.proc, 700, "slurmd")
