# SPDX-License-Identifier: Apache-2.0
"""One look at all processes: what it may have missed is said, and no more is said than that."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulock.alloc import environs, process_reader, process_scan
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_owner import FOREIGN, UNSEEN, classify_process
from gpulock.alloc.process_reader import is_root_program
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node import procfs, subordinate
from gpulock.node.devices import Device
from gpulock.node.procfs import Proc, ProcessStatus
from gpulock.node.settings import Settings
from gpulock.node.subordinate import SubordinateUids
from tests.support.faults import raising, returning
from tests.support.trees import FakeProc

HERE, GONE = 64_001, 64_002  # users


def look(proc: FakeProc) -> ProcessScan:
    return ProcessScan(Proc(str(proc.root)))


def look_at_files(scan: ProcessScan) -> OpenFiles:
    device = Device("0000:3b:00.0", 0)
    device.minor = 7
    return OpenFiles(scan, [device], Settings({}))


def test_a_look_that_ran_out_of_time_is_partial_and_blind(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_scan, "SCAN_SECONDS", -1.0)
    scan = look(proc)
    scan.statuses()
    assert scan.partial
    assert "no time for process" in scan.why_blind_about(1000)
    assert look_at_files(scan).users_by_device(1000)[1] == scan.why_blind_about(1000)


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
    scan.restrict({GONE: "gone"})
    assert (scan.list_new(), scan.complete) == ([], True)


@pytest.mark.root
def test_a_user_with_a_uid_of_32_bits_is_asked_about_as_any_other() -> None:
    """Directories give such uids; getpriority(2) takes a signed number."""
    uid = 3_000_000_001
    with subprocess.Popen(["sleep", "60"], user=uid) as sleeper:
        assert ProcessScan(Proc()).may_run(uid)
        sleeper.kill()
    scan = ProcessScan(Proc())
    scan.restrict({uid: "gone"})
    assert not scan.may_run(uid)


@pytest.mark.parametrize("unread", ["subuid", "nsswitch"])
def test_where_the_files_of_subordinate_uids_cannot_be_read_anybody_may_have_some(
    tmp_path: Path, unread: str
) -> None:
    paths = {name: str(tmp_path / name) for name in ("subuid", "nsswitch")}
    assert not subordinate.may_have_subordinate_uids(1000, "alice", **paths)
    (tmp_path / unread).mkdir()
    assert subordinate.may_have_subordinate_uids(1000, "alice", **paths)


def test_what_was_not_seen_stays_the_reason_of_a_look_that_never_comes_to_rest(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_scan, "ROUNDS", 1)
    scan = look(proc)
    scan.statuses()
    assert (scan.never_settled, scan.complete, "faster than" in scan.blind) == (True, True, True)
    proc.add(700)
    (proc.root / "700/status").write_text("garbage")
    scan = look(proc)
    scan.statuses()
    assert (scan.never_settled, "process 700 cannot be seen" in scan.blind) == (False, True)


def test_who_has_no_process_is_not_the_one_who_forks(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.add(700, uids=(0, 0, 0, 0))
    numbers = iter((699, 700))
    monkeypatch.setattr(process_scan, "SAMPLES", 1)
    monkeypatch.setattr(Proc, "last_pid", lambda _: next(numbers))
    scan = look(proc)
    scan.blind, scan.never_settled = "processes came and went", True
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


def test_programs_that_may_not_be_seen_are_believed(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = ProcessScan(Proc(str(proc.root)))
    assert tree.sees_all() and tree.sees_all()
    monkeypatch.setattr(Proc, "link", raising(PermissionError(13, "denied")))
    assert is_root_program(tree.proc, 700, "slurmd")


CROWD, HONEST = range(700, 800), range(800, 810)  # processes of GONE and of HERE


@pytest.fixture
def slow(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return whose statuses are read: one of the crowd takes 0.04 s, one of 65,536 groups."""
    passed, reads = [0.0], list[int]()
    real = Proc.status

    def status(tree: Proc, pid: int) -> ProcessStatus:
        reads.append(pid)
        passed[0] += 0.04 if pid in CROWD else 0.0
        return real(tree, pid)

    for pid in (*CROWD, *HONEST):
        proc.add(pid, uids=(HERE if pid in HONEST else GONE,) * 4)
    owned(monkeypatch, dict.fromkeys(CROWD, GONE) | dict.fromkeys(HONEST, HERE))
    monkeypatch.setattr(Proc, "status", status)
    inodes = Proc.inodes  # listed as the kernel does, whatever the order of a folder on a disk
    monkeypatch.setattr(Proc, "inodes", lambda tree: dict(sorted(inodes(tree).items())))
    clock = SimpleNamespace(monotonic=lambda: passed[0])
    for module in (process_reader, process_scan):
        monkeypatch.setattr(module, "time", clock)
    return reads


def assert_missed_of_the_crowd_alone(scan: ProcessScan) -> None:
    assert {*HONEST} < {*scan.statuses()}
    assert (scan.blind, scan.partial, scan.why_blind_about(HERE)) == ("", False, "")
    assert scan.why_blind_about(GONE) == scan.why_blind_about(None) != ""
    files = look_at_files(scan)
    assert files.users_by_device(HERE)[1] == ""
    assert (
        files.users_by_device(GONE)[1]
        == files.users_by_device(None)[1]
        == scan.why_blind_about(GONE)
    )


@pytest.mark.attack
@pytest.mark.parametrize(
    "uids", ["one", "in a namespace", "by set-user-id files", "of a set-user-id program"]
)
def test_processes_that_are_slow_to_read_are_a_doubt_of_their_user_alone(
    proc: FakeProc, slow: list[int], monkeypatch: pytest.MonkeyPatch, uids: str
) -> None:
    """Tried: 250 processes of 65,536 groups each, also each of another subordinate uid: a look had
    no time for the rest, so that nobody's lock was freed and nobody was served.

    Stopped by: the time is that of the account, and of one who has had enough no more are read.
    """
    if uids == "of a set-user-id program":
        for pid in CROWD:
            proc.add(pid, uids=(HERE, GONE, GONE, GONE))
    if uids in ("in a namespace", "by set-user-id files"):
        owned(monkeypatch, {pid: 3_000_000 + pid for pid in CROWD} | dict.fromkeys(HONEST, HERE))
        inside = CROWD if uids == "in a namespace" else ()
        monkeypatch.setattr(Proc, "namespace_owner", lambda _, pid: GONE if pid in inside else -1)
    if uids == "by set-user-id files":
        monkeypatch.setattr(SubordinateUids, "owner", lambda _, uid: GONE if uid > HERE else uid)
    scan = look(proc)
    assert_missed_of_the_crowd_alone(scan)
    assert len({*slow} & {*CROWD}) <= process_reader.ONE_USER / 0.04 + 1
    assert scan.why_blind_about(GONE) == process_reader.too_much_of(GONE)
    with pytest.raises(TimeoutError):
        scan.status(CROWD[-1])
    kinds = [classify_process(pid, [], scan, ()) for pid in (HONEST[0], CROWD[-1])]
    assert kinds == [FOREIGN, UNSEEN]


@pytest.mark.attack
def test_groups_that_are_too_many_are_a_doubt_of_their_user_alone(
    proc: FakeProc, slow: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: 85 processes with 65,536 groups of their own each: gpulockd kept 500 MiB of them.

    Stopped by: a list of more than some thousand groups is not kept, and may have any.
    """
    monkeypatch.setattr(procfs, "GROUPS_LIMIT", 10)
    proc.add(CROWD[0], uids=(GONE,) * 4, groups=range(10))
    for pid in CROWD[1:]:
        proc.remove(pid)
    scan = look(proc)
    assert_missed_of_the_crowd_alone(scan)
    assert f"process {CROWD[0]} has too many groups" in scan.why_blind_about(GONE)
    for uids in [(HERE, 0, 0, 0), (3_000_005,) * 4]:
        proc.add(CROWD[0], uids=uids, groups=range(10))
        owned(monkeypatch, {CROWD[0]: uids[1]})
        monkeypatch.setattr(Proc, "namespace_owner", returning(HERE))
        scan = look(proc)
        scan.statuses()
        assert "has too many groups" in scan.why_blind_about(HERE)


@pytest.mark.attack
def test_who_forks_processes_that_are_slow_to_read_is_told_from_others(
    proc: FakeProc, slow: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: new ones all the time, so that too few of the newest were read to tell whose they are.

    Stopped by: of a user who has had the time it counts whose a process is.
    """
    monkeypatch.setattr(process_scan, "SAMPLING", 1000.0)
    numbers = iter((CROWD[0], CROWD[-1]))
    monkeypatch.setattr(Proc, "last_pid", lambda _: next(numbers))
    scan = look(proc)
    scan.statuses()
    scan.blind, scan.never_settled = "processes came and went", True
    assert scan.why_blind_about(HERE) == ""
    assert (scan.may_fork(GONE), len(slow) < len(CROWD)) == (True, True)
    monkeypatch.setattr(ProcessScan, "may_fork", returning(False))
    assert scan.why_blind_about(GONE) == process_reader.too_much_of(GONE)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOTTY])  # before Linux 4.11 none tells
def test_where_namespaces_are_hidden_each_uid_answers_for_its_time(
    proc: FakeProc, slow: list[int], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(Proc, "namespace_owner", raising(OSError(code, "denied")))
    scan = look(proc)
    assert {*HONEST} < {*scan.statuses()}
    assert (scan.why_blind_about(HERE), scan.why_blind_about(GONE) != "") == ("", True)


@pytest.mark.attack
@pytest.mark.parametrize(("uid", "hidden"), [(GONE, True), (0, False)])
def test_environments_that_are_slow_to_read_take_the_same_time_and_never_the_systems(
    proc: FakeProc, slow: list[int], monkeypatch: pytest.MonkeyPatch, uid: int, hidden: bool
) -> None:
    """Tried: both, processes of many groups and environments that a thread changes all the time.

    Stopped by: one limit for all that is read of a user. Root's has no limit for statuses: without
    daemons and shepherds nobody's lock is judged.
    """
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: passed[0])
    for module in (process_reader, process_scan):
        monkeypatch.setattr(module, "time", clock)

    def read_environ(*_: object) -> bytes:
        passed[0] += 2.0
        return b"A=b\0"

    monkeypatch.setattr(environs, "read_environ", read_environ)
    for pid in CROWD:
        proc.add(pid, uids=(uid,) * 4)
    owned(monkeypatch, dict.fromkeys(CROWD, uid) | dict.fromkeys(HONEST, HERE))
    scan = look(proc)
    scan.read_start(CROWD[0], uid)
    assert scan.status(HONEST[0])
    with pytest.raises(TimeoutError, match="can be looked at in time"):
        scan.read_start(CROWD[1], uid)
    seen = {*scan.statuses()}
    assert {*HONEST} < seen
    assert (seen.isdisjoint(CROWD), scan.why_blind_about(uid) != "") == (hidden, hidden)
    assert scan.why_blind_about(HERE) == scan.blind == ""


def test_one_that_is_gone_when_it_is_asked_whose_it_is_was_not_read(
    proc: FakeProc, slow: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process that ends while it is read would be charged to nobody."""

    def met(pid: int) -> None:
        if pid == CROWD[-1]:
            proc.remove(pid)
            raise FileNotFoundError(2, "gone")

    owned(monkeypatch, dict.fromkeys(CROWD, GONE) | dict.fromkeys(HONEST, HERE), met)
    scan = look(proc)
    scan.statuses()
    assert CROWD[-1] not in slow


def test_one_that_ends_while_it_is_asked_whose_it_is_is_gone(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.add(700, uids=(HERE,) * 4)
    monkeypatch.setattr(Proc, "namespace_owner", raising(ProcessLookupError(3, "gone")))
    with pytest.raises(ProcessLookupError):
        look(proc).status(700)
