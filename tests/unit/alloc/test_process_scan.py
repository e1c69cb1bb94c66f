# SPDX-License-Identifier: Apache-2.0
"""One look at all processes: what it may have missed is said, and no more is said than that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.alloc import process_scan
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.release import restrict_to_owners
from gpulock.node.procfs import Proc
from gpulock.store.locks import Lock
from tests.support.faults import raising
from tests.support.trees import EXECD, INIT, FakeProc, bus, record

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


PLAIN: dict[str, object] = {}


class Restricted(ProcessScan):
    """A look that only notes what it is told to leave out."""

    __slots__ = ("told",)

    def restrict(self, users: dict[int, str], shepherd: int | None = 0) -> None:
        self.told = (users, shepherd)


@pytest.mark.parametrize(
    ("jobs", "shepherd"),
    [
        ([PLAIN], 500),
        ([PLAIN, PLAIN], 500),
        ([PLAIN, {"pid": 501}], 0),  # of two runs each shepherd may have some
        ([{"add_grp_id": 0}], 0),  # no group would show what root runs elsewhere
        ([{"scheduler": "slurm", "pid": 0, "add_grp_id": 0}], None),
        ([{"scheduler": "slurm", "pid": 0, "add_grp_id": 0}, PLAIN], 500),
    ],
)
def test_what_root_runs_for_a_job_is_looked_for_where_its_marks_allow(
    proc: FakeProc, jobs: list[dict[str, object]], shepherd: int | None
) -> None:
    scan = Restricted(Proc(str(proc.root)))
    locks = [Lock(bus(number), record(**job), "") for number, job in enumerate(jobs)]
    restrict_to_owners(scan, locks)
    assert scan.told == ({1000: "alice"}, shepherd)


EPILOG = 900


@pytest.mark.parametrize(
    ("case", "found"),
    [
        (
            "below",
            {500, EPILOG, 700, EXECD, 701, 702},
        ),  # what a job leaves goes up, to init at last
        ("beside", {INIT, 500, EPILOG, 700, EXECD, 701, 702, 703}),
        ("untold", {INIT, 500, EPILOG, 700, EXECD, 701, 702, 703}),
    ],
)
def test_for_a_user_without_processes_what_is_near_the_shepherd_is_looked_at_if_it_can_be(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch, case: str, found: set[int]
) -> None:
    tree = {
        INIT: [EXECD, 702],
        EXECD: [500, 701],
        500: [EPILOG, 700],
        EPILOG: list[int](),
        700: list[int](),
        701: list[int](),
        702: [703],
        703: list[int](),
    }
    for pid, below in tree.items():
        above = next((one for one, some in tree.items() if pid in some), 0)
        proc.add(pid, ppid=above, uids=(0,) * 4)
        told = " ".join(map(str, below))
        (proc.root / f"{pid}/task/{pid}/children").write_text(told)
    if case == "untold":
        (proc.root / f"{EXECD}/task/{EXECD}/children").unlink()
    monkeypatch.setattr(os, "getpid", lambda: EPILOG)

    def nobody(_scan: ProcessScan, _uid: int) -> bool:
        return False

    monkeypatch.setattr(ProcessScan, "may_run", nobody)
    scan = look(proc)
    scan.restrict({1000: "alice"}, 701 if case == "beside" else 500)
    assert set(scan.statuses()) == found


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
