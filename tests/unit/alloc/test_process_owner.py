# SPDX-License-Identifier: Apache-2.0
"""Whose a process is: by group, session, descent, cgroup and program, as an ordinary user sees."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from gpulock.alloc import process_owner
from gpulock.alloc.process_owner import (
    FOREIGN,
    GONE,
    OWNERS,
    SERVICE,
    UNSEEN,
    belongs_to_other_claim,
    classify_process,
)
from gpulock.alloc.process_reader import is_root_program
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import Proc
from gpulock.slurm.steps import is_slurm_job_process
from gpulock.store.locks import Lock
from tests.support.exporter_nodes import lock
from tests.support.faults import raising
from tests.support.trees import HOST_NS, FakeProc, bus, record

ROOT = (0, 0, 0, 0)
SHEPHERD, JOB = 500, 700
SERVICES = ("nvidia-persistenced", "Xorg", "gpulock-exporter")
SLURM: dict[str, Any] = {
    "scheduler": "slurm",
    "pid": 0,
    "start": 0,
    "add_grp_id": 0,
    "slurmd": "node1",
}


def judged(proc: FakeProc, pid: int, *locks: Lock) -> str:
    tree = ProcessScan(Proc(str(proc.root)), {"slurm": is_slurm_job_process})
    return classify_process(pid, locks, tree, SERVICES)


def in_cgroup(proc: FakeProc, pid: int, text: str) -> None:
    (proc.root / str(pid) / "cgroup").write_text(text)


PROCESS: dict[str, Any] = {"scheduler": "process", "pid": 300, "add_grp_id": 0}
SHEPHERDS: dict[str, Any] = {"pid": SHEPHERD, "add_grp_id": 0}


@pytest.mark.parametrize(
    ("claim", "about", "whose"),
    [
        (None, {}, FOREIGN),
        ({"add_grp_id": 65400}, {"groups": (100, 65400)}, OWNERS),
        ({"add_grp_id": 65400}, {"groups": (100, 65401)}, FOREIGN),
        ({**SHEPHERDS, "start": 1000}, {"ppid": SHEPHERD + 1}, OWNERS),
        ({**SHEPHERDS, "start": 999}, {"ppid": SHEPHERD}, FOREIGN),
        ({**PROCESS, "sid": 300}, {"session": 300}, OWNERS),
        ({**PROCESS, "sid": 301}, {"session": 300}, FOREIGN),
        ({**PROCESS, "sid": 300}, {"session": 300, "uids": (1001,) * 4}, FOREIGN),
        ({"add_grp_id": 0, "sid": 0}, {"session": 0, "groups": (0,)}, FOREIGN),
    ],
)
def test_group_descent_or_session_tell_whose_a_process_is(
    proc: FakeProc, claim: dict[str, Any] | None, about: dict[str, Any], whose: str
) -> None:
    proc.add(SHEPHERD, "sge_shepherd", start=1000, uids=ROOT)
    proc.add(SHEPHERD + 1, ppid=SHEPHERD)
    proc.add(JOB, **about)
    assert judged(proc, JOB, *([] if claim is None else [lock(**claim)])) == whose


def test_the_group_of_a_slave_task_counts_as_well(proc: FakeProc) -> None:
    proc.add(JOB, groups=(65401,))
    held = lock(add_grp_id=65400)
    held.anchors = [(501, 1000, 65401)]
    assert judged(proc, JOB, held) == OWNERS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n", OWNERS),
        ("0::/system.slice/node1_slurmstepd.scope/job_12/step_0\n", OWNERS),
        ("5:freezer:/slurm/uid_1000/job_12/step_batch\n0::/\n", OWNERS),
        ("5:memory:/slurm_node1/uid_1000/job_12\n", OWNERS),
        ("4:cpu,memory:/slurm/uid_1000/job_12/step_0\n", OWNERS),
        ("0::/system.slice/slurmstepd.scope/job_123/step_0\n", FOREIGN),
        ("0::/user.slice/user-1000.slice/slurmstepd.scope/job_12\n", FOREIGN),
        ("5:freezer:/slurm/uid_1001/job_12/step_batch\n", FOREIGN),
        ("garbage\n\n::\n", FOREIGN),
    ],
)
def test_the_cgroup_of_a_slurm_job_tells_its_processes(
    text: str, expected: str, proc: FakeProc
) -> None:
    proc.add(JOB)
    in_cgroup(proc, JOB, text)
    assert judged(proc, JOB, lock(**SLURM)) == expected


@pytest.mark.parametrize("end", ["\f", "\r", "\x1c", "\x85", "\u2028"])
def test_no_user_names_a_cgroup_that_is_another_jobs(end: str, proc: FakeProc) -> None:
    """A user may make folders below their own cgroup, and the kernel refuses newlines alone."""
    proc.add(JOB)
    in_cgroup(proc, JOB, f"0::/user.slice/x{end}5:freezer:/slurm/uid_1000/job_12/step_0\n")
    assert judged(proc, JOB, lock(**SLURM)) == FOREIGN


@pytest.mark.parametrize(
    ("name", "about", "expected"),
    [
        ("Xorg", {"uids": ROOT}, SERVICE),
        ("nvidia-persiste", {"uids": (143,) * 4}, SERVICE),
        ("gpulock-exporte", {"uids": (998,) * 4}, SERVICE),
        ("Xorg", {"uids": (1000,) * 4}, FOREIGN),
        ("Xorg", {"uids": (999, 0, 0, 0)}, SERVICE),
        ("Xorg", {"uids": (1000, 0, 0, 0)}, FOREIGN),
        ("Xorg", {"uids": (0, 1000, 0, 0)}, FOREIGN),
        ("Xorg", {"uids": (0, 0, 1000, 0)}, FOREIGN),
        ("python3", {"uids": ROOT}, FOREIGN),
        ("nvidia-persist", {"uids": ROOT}, FOREIGN),
    ],
)
def test_a_service_is_recognised_by_name_and_user(
    name: str, about: Any, expected: str, proc: FakeProc
) -> None:
    proc.add(JOB, name, **about)
    assert judged(proc, JOB) == expected


def test_what_a_scheduler_started_is_no_service(proc: FakeProc) -> None:
    proc.add(SHEPHERD, "sge_shepherd", uids=ROOT)
    proc.add(JOB, "Xorg", uids=ROOT, ppid=SHEPHERD)
    assert judged(proc, JOB) == FOREIGN


def test_a_process_that_ended_is_gone_and_one_that_hides_is_not_seen(proc: FakeProc) -> None:
    assert judged(proc, JOB) == GONE
    shutil.rmtree(proc.root / "1")  # hidepid: not even init is to be seen
    assert judged(proc, JOB) == UNSEEN


def test_a_zombie_is_gone_unless_a_thread_of_it_goes_on(proc: FakeProc) -> None:
    """It has no memory of the driver's any more, and nobody can end it."""
    proc.add(JOB, state="Z")
    assert judged(proc, JOB) == GONE
    proc.add(JOB, state="Z", threads={JOB + 1: "S"})
    assert judged(proc, JOB) == FOREIGN


def test_in_a_container_a_pid_that_is_not_there_is_not_gone(proc: FakeProc) -> None:
    proc.namespace(HOST_NS.replace("1836", "9999"))
    assert judged(proc, JOB) == UNSEEN


def test_beside_a_lock_that_cannot_be_read_nothing_is_foreign(proc: FakeProc) -> None:
    proc.add(JOB)
    assert judged(proc, JOB, Lock(bus(0), None, "half-written")) == UNSEEN


def belongs(proc: FakeProc, process: int, **other: object) -> bool:
    """Return whether a process is of another claim than the record of job 12."""
    tree = ProcessScan(Proc(str(proc.root)))
    lock = Lock("y", record(**{"job_id": "13", "token": "b", "add_grp_id": 0, **other}), "")
    return belongs_to_other_claim(process, lock, record(), tree)


def test_a_process_of_the_claim_itself_is_not_of_another(proc: FakeProc) -> None:
    proc.add(700, groups=[65400])
    assert not belongs(proc, 700, token=record().token, add_grp_id=65400)
    assert not belongs(proc, 700, add_grp_id=65400)
    proc.add(701, groups=[65401])  # a task of the same grant
    assert not belongs(proc, 701, token=record().token, add_grp_id=65401)


def test_the_token_in_its_environment_tells_what_a_claim_started_of_its_user_alone(
    proc: FakeProc,
) -> None:
    claim = lock(scheduler="process", pid=300, sid=0, add_grp_id=0, uid=1000, token="t")
    for uids, words, whose in (
        ((1000,) * 4, b"GPULOCK_CLAIM=t\0", OWNERS),
        ((1000, 0, 0, 0), b"GPULOCK_CLAIM=t\0", OWNERS),
        ((1000,) * 4, b"GPULOCK_CLAIM=u\0", FOREIGN),
        ((1001,) * 4, b"GPULOCK_CLAIM=t\0", FOREIGN),
    ):
        (proc.root / str(proc.add(JOB, uids=uids)) / "environ").write_bytes(words)
        assert judged(proc, JOB, claim) == whose


def test_the_command_of_a_claim_runs_elsewhere_where_it_lives_and_is_not_above_us(
    proc: FakeProc,
) -> None:
    proc.add(600, start=1000)
    proc.add(700, ppid=600)
    proc.add(800)
    tree = ProcessScan(Proc(str(proc.root)))
    command = record(scheduler="process", pid=600, comment=process_owner.RUN)
    seen = [process_owner.is_command_running_elsewhere(command, pid, tree) for pid in (800, 700)]
    assert seen == [True, False]
    assert not process_owner.is_command_running_elsewhere(command.copy(start=999), 800, tree)


@pytest.mark.parametrize("ending", ["", "-wlm", " (deleted)"])  # the last after an upgrade
def test_a_daemon_is_told_by_its_program(proc: FakeProc, ending: str) -> None:
    (proc.root / str(proc.add(JOB)) / "exe").symlink_to(f"/usr/sbin/slurmd{ending}")
    node = Proc(str(proc.root))
    named = [is_root_program(node, JOB, name) for name in ("slurmd", "slurm")]
    assert named == [True, False]
    assert not is_root_program(node, JOB + 1, "slurmd")


@pytest.mark.parametrize("sid", [0, 300])
def test_a_session_that_both_claims_have_or_none_proves_nothing(proc: FakeProc, sid: int) -> None:
    """A kernel thread, and a process from outside of our pid namespace, are of session 0."""
    proc.add(700, session=sid)
    tree = ProcessScan(Proc(str(proc.root)))
    held = Lock("y", record(token="b", pid=999, add_grp_id=0, sid=sid), "")
    assert not belongs_to_other_claim(700, held, record(sid=300), tree)


@pytest.mark.parametrize(
    ("pid", "mark", "whose"),
    [
        (801, "800 7", OWNERS),  # below the daemon
        (802, "800 7", OWNERS),  # of its session
        (803, "800 7", FOREIGN),
        (801, "800 8", FOREIGN),  # another process has its number
        (801, "900 7", FOREIGN),  # it is gone
        (801, "! it does not start", FOREIGN),
    ],
)
def test_what_the_mps_of_a_card_started_is_its_holders(
    proc: FakeProc, pid: int, mark: str, whose: str
) -> None:
    proc.add(800, session=800, start=7)
    proc.add(801, ppid=800)
    proc.add(802, session=800)
    proc.add(803)
    held = lock(add_grp_id=0)
    held.mps = mark
    assert judged(proc, pid, held) == whose


def test_what_is_below_a_shepherd_that_cannot_be_seen_is_not_proven_to_be_its(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.add(SHEPHERD, "sge_shepherd", uids=ROOT)
    proc.add(JOB, ppid=SHEPHERD)
    assert judged(proc, JOB, lock(pid=SHEPHERD, start=1000, add_grp_id=0)) == OWNERS
    monkeypatch.setattr(Proc, "running", raising(PermissionError(13, "denied")))
    assert judged(proc, JOB, lock(pid=SHEPHERD, start=1000, add_grp_id=0)) == FOREIGN
