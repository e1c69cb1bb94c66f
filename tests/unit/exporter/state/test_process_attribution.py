# SPDX-License-Identifier: Apache-2.0
"""Whose a process on a device is, by what an ordinary user can see of it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from gpulock_exporter.state.process_attribution import (
    ProcessClass,
    ProcessTree,
    classify_device_processes,
    classify_process,
)
from gpulock_exporter.telemetry import Process

from gpulock.node.procfs import Proc
from gpulock.store.locks import Lock
from tests.support.exporter_nodes import lock
from tests.support.trees import HOST_NS, FakeProc, bus

ROOT = (0, 0, 0, 0)
SHEPHERD, STEPD, JOB = 500, 600, 700
SERVICES = ("nvidia-persistenced", "Xorg", "gpulock-exporter")
SLURM: dict[str, Any] = {
    "scheduler": "slurm",
    "pid": 0,
    "start": 0,
    "add_grp_id": 0,
    "slurmd": "node1",
}


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


def judged(proc: FakeProc, pid: int, *locks: Lock) -> ProcessClass:
    return classify_process(pid, locks, ProcessTree(Proc(str(proc.root))), SERVICES)


def in_cgroup(proc: FakeProc, pid: int, text: str) -> None:
    (proc.root / str(pid) / "cgroup").write_text(text)


def test_a_process_on_a_free_device_is_foreign(proc: FakeProc) -> None:
    proc.add(JOB)
    assert judged(proc, JOB) is ProcessClass.FOREIGN


def test_the_jobs_group_tells_its_processes(proc: FakeProc) -> None:
    proc.add(JOB, groups=(100, 65400))
    proc.add(JOB + 1, groups=(100, 65401))
    assert judged(proc, JOB, lock(add_grp_id=65400)) is ProcessClass.OWNERS
    assert judged(proc, JOB + 1, lock(add_grp_id=65400)) is ProcessClass.FOREIGN


def test_the_group_of_a_slave_task_counts_as_well(proc: FakeProc) -> None:
    proc.add(JOB, groups=(65401,))
    held = lock(add_grp_id=65400)
    held.anchors = [(501, 1000, 65401)]
    assert judged(proc, JOB, held) is ProcessClass.OWNERS


def test_what_descends_from_the_shepherd_is_the_owners(proc: FakeProc) -> None:
    proc.add(SHEPHERD, "sge_shepherd", start=1000, uids=ROOT)
    proc.add(JOB, ppid=SHEPHERD)
    proc.add(JOB + 1, ppid=JOB)
    assert (
        judged(proc, JOB + 1, lock(pid=SHEPHERD, start=1000, add_grp_id=0)) is ProcessClass.OWNERS
    )


def test_another_process_of_the_shepherds_pid_is_no_shepherd(proc: FakeProc) -> None:
    proc.add(SHEPHERD, start=2000)
    proc.add(JOB, ppid=SHEPHERD)
    assert judged(proc, JOB, lock(pid=SHEPHERD, start=1000, add_grp_id=0)) is ProcessClass.FOREIGN


def test_the_session_of_a_claim_of_a_process_is_its(proc: FakeProc) -> None:
    proc.add(JOB, session=300)
    claim: dict[str, Any] = {"scheduler": "process", "pid": 300, "sid": 300, "add_grp_id": 0}
    other: dict[str, Any] = {**claim, "sid": 301}
    assert judged(proc, JOB, lock(**claim)) is ProcessClass.OWNERS
    assert judged(proc, JOB, lock(**other)) is ProcessClass.FOREIGN


def test_no_group_and_no_session_tell_nothing(proc: FakeProc) -> None:
    proc.add(JOB, session=0, groups=(0,))
    assert judged(proc, JOB, lock(add_grp_id=0, sid=0)) is ProcessClass.FOREIGN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n", ProcessClass.OWNERS),
        ("0::/system.slice/node1_slurmstepd.scope/job_12/step_0\n", ProcessClass.OWNERS),
        ("5:freezer:/slurm/uid_1000/job_12/step_batch\n0::/\n", ProcessClass.OWNERS),
        ("5:memory:/slurm_node1/uid_1000/job_12\n", ProcessClass.OWNERS),
        ("4:cpu,memory:/slurm/uid_1000/job_12/step_0\n", ProcessClass.OWNERS),
        ("0::/system.slice/slurmstepd.scope/job_123/step_0\n", ProcessClass.FOREIGN),
        ("0::/user.slice/user-1000.slice/slurmstepd.scope/job_12\n", ProcessClass.FOREIGN),
        ("5:freezer:/slurm/uid_1001/job_12/step_batch\n", ProcessClass.FOREIGN),
        ("garbage\n\n::\n", ProcessClass.FOREIGN),
    ],
)
def test_the_cgroup_of_a_slurm_job_tells_its_processes(
    text: str, expected: ProcessClass, proc: FakeProc
) -> None:
    proc.add(JOB)
    in_cgroup(proc, JOB, text)
    assert judged(proc, JOB, lock(**SLURM)) is expected


def test_the_step_daemon_above_tells_where_slurm_keeps_no_cgroup(proc: FakeProc) -> None:
    proc.add(STEPD, "slurmstepd", uids=ROOT)
    (proc.root / str(STEPD) / "cmdline").write_bytes(b"slurmstepd: [12.batch]\0")
    proc.add(JOB, ppid=STEPD)
    assert judged(proc, JOB, lock(**SLURM)) is ProcessClass.OWNERS
    other: dict[str, Any] = {**SLURM, "job_id": "13"}
    assert judged(proc, JOB, lock(**other)) is ProcessClass.FOREIGN
    proc.add(STEPD, "slurmstepd", uids=(1000,) * 4)
    (proc.root / str(STEPD) / "cmdline").write_bytes(b"slurmstepd: [12.batch]\0")
    assert judged(proc, JOB, lock(**SLURM)) is ProcessClass.FOREIGN


def test_any_claim_on_the_card_may_own_it(proc: FakeProc) -> None:
    proc.add(JOB, groups=(65401,))
    locks = [lock(0, "a", "gi1.ci0"), lock(0, "b", "gi2.ci0", add_grp_id=65401)]
    assert judged(proc, JOB, *locks) is ProcessClass.OWNERS


@pytest.mark.parametrize(
    ("name", "about", "expected"),
    [
        ("Xorg", {"uids": ROOT}, ProcessClass.SERVICE),
        ("nvidia-persiste", {"uids": (143,) * 4}, ProcessClass.SERVICE),
        ("gpulock-exporte", {"uids": (998,) * 4}, ProcessClass.SERVICE),
        ("Xorg", {"uids": (1000,) * 4}, ProcessClass.FOREIGN),
        ("Xorg", {"uids": (1000, 0, 0, 0)}, ProcessClass.FOREIGN),
        ("python3", {"uids": ROOT}, ProcessClass.FOREIGN),
        ("Xorg", {"uids": ROOT, "exe": "/usr/bin/perl"}, ProcessClass.FOREIGN),
        ("other", {"uids": ROOT, "exe": "/usr/bin/nvidia-persistenced"}, ProcessClass.SERVICE),
    ],
)
def test_a_service_is_told_by_its_program_or_its_name_and_its_user(
    name: str, about: Any, expected: ProcessClass, proc: FakeProc
) -> None:
    proc.add(JOB, name, **about)
    assert judged(proc, JOB) is expected


def test_what_a_scheduler_started_is_no_service(proc: FakeProc) -> None:
    proc.add(SHEPHERD, "sge_shepherd", uids=ROOT)
    proc.add(JOB, "Xorg", uids=ROOT, ppid=SHEPHERD)
    assert judged(proc, JOB) is ProcessClass.FOREIGN


def test_a_process_that_ended_is_gone_and_one_that_hides_is_not_seen(proc: FakeProc) -> None:
    assert judged(proc, JOB) is ProcessClass.GONE
    shutil.rmtree(proc.root / "1")  # hidepid: not even init is to be seen
    assert judged(proc, JOB) is ProcessClass.UNSEEN


def test_in_a_container_a_pid_that_is_not_there_is_not_gone(proc: FakeProc) -> None:
    proc.namespace(HOST_NS.replace("1836", "9999"))
    assert judged(proc, JOB) is ProcessClass.UNSEEN


def test_what_may_not_be_read_is_not_foreign(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.add(JOB)

    def denied(_proc: Proc, pid: int) -> object:
        raise PermissionError(errno.EACCES, "hidepid=1", str(pid))

    monkeypatch.setattr(Proc, "status", denied)
    assert judged(proc, JOB) is ProcessClass.UNSEEN


def test_a_status_that_is_garbage_is_not_foreign(proc: FakeProc) -> None:
    proc.add(JOB)
    (proc.root / str(JOB) / "status").write_text("nonsense")
    assert judged(proc, JOB) is ProcessClass.UNSEEN


def test_beside_a_lock_that_cannot_be_read_nothing_is_foreign(proc: FakeProc) -> None:
    proc.add(JOB)
    assert judged(proc, JOB, Lock(bus(0), None, "half-written")) is ProcessClass.UNSEEN


def test_parents_that_go_round_in_a_circle_end(proc: FakeProc) -> None:
    proc.add(JOB, ppid=JOB + 1)
    proc.add(JOB + 1, ppid=JOB)
    assert judged(proc, JOB, lock()) is ProcessClass.FOREIGN


def test_all_on_a_device_are_counted_by_whose_they_are(proc: FakeProc) -> None:
    proc.add(JOB, groups=(65400,))
    proc.add(JOB + 1, "Xorg", uids=ROOT)
    proc.add(JOB + 3)
    proc.add(JOB + 2)
    proc.add(JOB + 4)
    (proc.root / str(JOB + 4) / "status").write_text("nonsense")
    listed = [Process(JOB + number) for number in (0, 1, 3, 2, 4, 5)]
    found = classify_device_processes(listed, [lock()], ProcessTree(Proc(str(proc.root))), SERVICES)
    assert (found.listed, found.foreign, found.unseen) == (5, (JOB + 2, JOB + 3), 1)
