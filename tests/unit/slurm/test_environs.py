# SPDX-License-Identifier: Apache-2.0
"""Which job or claim a process was started for: each environment is read once, within a limit."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from gpulock.alloc import environs, process_reader
from gpulock.alloc.environs import environ_value
from gpulock.alloc.job_processes import find_job_processes
from gpulock.alloc.process_owner import FOREIGN, OWNERS, UNSEEN, classify_process
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import Proc
from gpulock.node.timed_read import hung_error
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.slurm.steps import SlurmSteps
from tests.support.exporter_nodes import lock
from tests.support.faults import raising
from tests.support.slurm_site import OTHER_UID, UID, Site, slurm_lock


@pytest.mark.parametrize(
    ("environ", "value"),
    [
        (b"SLURM_JOB_ID=12\0A=b\0", b"12"),
        (b"A=b\0SLURM_JOB_ID=12\0SLURM_JOB_ID=13", b"12"),
        (b"A=SLURM_JOB_ID=12\0", b""),
        (b"XSLURM_JOB_ID=12\0", b""),
        (b"SLURM_JOB_IDS=12\0", b""),
        (b"SLURM_JOB_ID=" + b"1" * 1000, b"1" * 256),
    ],
)
def test_a_variable_is_what_stands_between_two_zeros(environ: bytes, value: bytes) -> None:
    assert environ_value(environ, b"SLURM_JOB_ID=") == value


def reasons(site: Site, *uids: int) -> list[str]:
    """Return why something may be left of a job of each user, by one look."""
    node = site.node()
    steps, scan = SlurmSteps(node.settings), ProcessScan(node.proc)
    locks = [slurm_lock(uid=uid) for uid in uids]
    return [find_job_processes(lock, scan, steps.add_members).reason() for lock in locks]


def test_the_judge_of_all_schedulers_knows_a_process_of_a_slurm_job(site: Site) -> None:
    site.left_by(900)
    scan = make_liveness_judge(site.node()).scan
    assert classify_process(900, [slurm_lock(uid=UID)], scan, ()) == OWNERS


@pytest.mark.attack
def test_a_users_environments_are_read_once_for_all_locks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: many processes with large environments beside many locks, so that a judge of each lock
    reads each of them.

    Stopped by: one reading of a user's environments a look, whoever asks.
    """
    for pid in range(900, 910):
        site.process(pid, "python")
    reads: list[int] = []
    read_memory = Proc.read_memory

    def counted(self: Proc, pid: int, name: str, seconds: float) -> bytes:
        reads.append(pid)
        return read_memory(self, pid, name, seconds)

    monkeypatch.setattr(Proc, "read_memory", counted)
    assert reasons(site, UID, UID, UID) == ["", "", ""]
    assert sorted(reads) == [*range(900, 910)]


@pytest.mark.attack
def test_an_environment_says_something_of_its_own_users_jobs_alone(site: Site) -> None:
    """Tried: a process with the variables of another user's job, which would keep that one's lock.

    Stopped by: the environments of the job's user alone are compared.
    """
    site.left_by(900, uid=OTHER_UID)
    site.process(901, "python")
    other, own = reasons(site, OTHER_UID, UID)
    assert (other, own) == ("process 900 was started as the job's", "")


@pytest.mark.attack
def test_a_look_at_one_users_environments_has_an_end_and_is_a_doubt_of_that_user_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: 1,500 processes of 640,000 strings each: an Epilog took 84 s, gpulockd more.

    Stopped by: a second for one user, whose own locks then stay.
    """
    site.process(900, "python")
    monkeypatch.setattr(process_reader, "ONE_USER", -1.0)
    own, other = reasons(site, UID, OTHER_UID)
    assert (own, other) == (process_reader.too_much_of(UID), "")


@pytest.mark.attack
@pytest.mark.parametrize("hangs", [False, True])
def test_processes_that_are_slow_to_read_cost_one_limit_in_all(
    site: Site, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Tried: a hundred processes of one memory, which a thread changes all the time, with a GPU
    open: each environment takes just under a second, and gpulockd's watchdog ends it.

    Stopped by: one limit for a user's environments in a look, by the clock, whoever asks.
    """
    passed, reads = [0.0], list[int]()

    def slow(_: Proc, pid: int, name: str, seconds: float) -> bytes:
        assert (name, seconds > 0) == ("environ", True)
        reads.append(pid)
        passed[0] += 0.9
        if hangs:
            raise hung_error(pid)
        return b"A=b\0"

    monkeypatch.setattr(Proc, "read_memory", slow)
    clock = SimpleNamespace(monotonic=lambda: passed[0], sleep=raising(AssertionError()))
    for module in (environs, process_reader):
        monkeypatch.setattr(module, "time", clock)
    pids = [*range(900, 1000)]
    for pid in pids:
        site.process(pid, "python")
    scan = ProcessScan(site.node().proc, {"slurm": SlurmSteps(site.node().settings).owns})
    process: dict[str, Any] = {"scheduler": "process", "pid": 300, "sid": 0, "add_grp_id": 0}
    held = [lock(**process, uid=UID, token="t"), slurm_lock(uid=UID)]
    judged = [classify_process(pid, held, scan, ()) for pid in pids]
    assert len(reads) == 2
    assert judged == [*[UNSEEN if hangs else FOREIGN] * 2, *[UNSEEN] * 98]
    assert find_job_processes(held[0], scan).doubt == process_reader.too_much_of(UID)
    assert len(reads) == 2
    again = ProcessScan(scan.proc)
    for pid, why in zip(pids, ["hangs", "than can be looked at in time"] * hangs):
        with pytest.raises(TimeoutError, match=why):
            again.read_start(pid, UID)
    behind_the_gate = ProcessScan(scan.proc)
    behind_the_gate.scan_closed = True
    with pytest.raises(TimeoutError, match="before the gate"):
        behind_the_gate.read_start(pids[0], UID)
    assert "before the gate" in behind_the_gate.started_as(UID)[1]


@pytest.mark.parametrize(
    ("fault", "times", "reason"),
    [
        (PermissionError(13, "denied"), 3, ""),
        (PermissionError(13, "denied"), 99, "process 900 cannot be seen"),
        (ProcessLookupError(3, "gone"), 99, ""),
    ],
)
def test_a_process_that_is_hidden_from_its_own_user_for_a_moment_is_read_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, fault: OSError, times: int, reason: str
) -> None:
    """One that ends, or whose user namespace is new, as an ordinary user sees it."""
    site.process(900, "python")
    hidden = iter(range(times))
    read_memory = Proc.read_memory

    def hiding(self: Proc, pid: int, name: str, seconds: float) -> bytes:
        if next(hidden, None) is not None:
            raise fault
        return read_memory(self, pid, name, seconds)

    monkeypatch.setattr(Proc, "read_memory", hiding)
    monkeypatch.setattr(os, "geteuid", lambda: UID)
    monkeypatch.setattr(environs, "PAUSES", (0.0,) * 9)
    (told,) = reasons(site, UID)
    assert told.partition(": ")[0] == reason


@pytest.mark.attack
@pytest.mark.parametrize("uids", [(0, 0, 0, 0), (0, UID, 0, UID)])
def test_a_set_user_id_program_under_the_name_of_a_step_daemon_is_none(
    site: Site, uids: tuple[int, ...]
) -> None:
    """Tried: a link `slurmstepd` to sudo, started with the title of another user's ended job.

    Stopped by: the program that runs, which is no slurmstepd.
    """
    site.set(SIMULATION="")
    node = site.node()
    site.proc.add(700, "slurmstepd", uids=uids, exe="/usr/bin/sudo")
    (site.proc.root / "700/cmdline").write_bytes(b"slurmstepd: [12.0]\0")
    steps, scan = SlurmSteps(node.settings), ProcessScan(node.proc)
    assert steps.daemons(scan) == {}
    site.proc.add(701, "slurmd", uids=uids, exe="/usr/bin/sudo")
    assert not steps.is_slurmd_seen(ProcessScan(node.proc))
