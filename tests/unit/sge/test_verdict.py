# SPDX-License-Identifier: Apache-2.0
"""Whether a Grid Engine job is alive, from this node alone, and what of it is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.alloc.job_processes import JobProcesses, find_job_processes
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.isolation import job
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.sge.members import SgeMembers
from gpulock.sge.verdict import make_sge_rule
from gpulock.store.locks import Lock
from gpulock.store.verdicts import ALIVE, DEAD, UNKNOWN, Verdict
from tests.support.faults import fail_at, raising, returning
from tests.support.trees import BOOT, EXECD, Box, FakeProc, box_with_shepherd, bus, judge_of, record

GID = 65400


class Host:
    """A node whose execd runs, and one lock of job 12: shepherd 500, group 65400."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fake = FakeProc(root / "proc")
        self.fake.execd(root)
        self.lock = Lock("0000:3b:00.0", record(), "")

    def spool(self, name: str, config: str = "") -> Path:
        folder = self.root / "active_jobs" / name
        folder.mkdir(parents=True, exist_ok=True)
        if config:
            (folder / "config").write_text(config)
        return folder

    def heir(self, pid: int, gid: int = GID) -> None:
        """Let another job's shepherd own a group."""
        cwd = self.spool(f"{pid}.1", f"add_grp_id={gid}\njob_id={pid}\n")
        self.fake.shepherd(pid, cwd)

    def left(self) -> JobProcesses:
        node = Node(Settings({"PROC_ROOT": str(self.fake.root)}))
        return find_job_processes(self.lock, ProcessScan(node.proc), SgeMembers(node))

    def verdict(self, simulated: bool = False) -> Verdict:
        keys = {"PROC_ROOT": str(self.fake.root), "SYS_ROOT": str(self.root / "sys")}
        node = Node(Settings(keys | ({"SIMULATION": str(self.root)} if simulated else {})))
        scan = ProcessScan(node.proc)
        members = {"sge": SgeMembers(node)}
        return Judge(BOOT, scan, {"sge": make_sge_rule(node)}, members).verdict(self.lock)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_job_lives_while_somebody_carries_its_group(host: Host) -> None:
    host.fake.add(700, groups=[4, GID])
    found = host.verdict()
    assert (found.state, "700" in found.proof) == (ALIVE, True)


def test_an_anchor_keeps_the_job_and_so_does_its_group(host: Host) -> None:
    host.lock.anchors = [(600, 2000, 65401)]
    found = host.verdict()
    assert (found.state, f"no process carries its group {GID}" in found.proof) == (DEAD, True)
    host.fake.add(700, groups=[65401])
    assert host.verdict().state == ALIVE
    host.fake.remove(700)
    host.fake.shepherd(600, host.spool("1.node1"), start=2000)
    assert host.verdict().state == ALIVE
    host.fake.shepherd(600, host.spool("1.node1"), start=2001)
    assert host.verdict().state == DEAD


def test_a_process_that_a_user_calls_execd_is_none(host: Host) -> None:
    host.fake.remove(EXECD)
    host.fake.add(700, "sge_execd", cwd=host.root)
    assert host.verdict().state == UNKNOWN


def test_an_execd_whose_directory_cannot_be_read_is_unknown(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, "readlink", "/cwd", PermissionError(1, "not permitted"))
    assert host.verdict().state == UNKNOWN


def test_a_shepherd_that_may_not_be_seen_is_unknown(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.fake.shepherd(500, host.spool("12.1"))
    fail_at(monkeypatch, "open", "/500/stat", PermissionError(1, "not permitted"))
    found = host.verdict()
    assert (found.state, "its shepherd 500 cannot be seen" in found.proof) == (UNKNOWN, True)


def test_a_group_that_is_another_jobs_now_does_not_keep_the_lock(host: Host) -> None:
    host.heir(900)
    host.fake.add(901, ppid=900, groups=[GID])
    host.fake.add(902, ppid=901, groups=[GID])
    found = host.verdict()
    assert (found.state, "another job" in found.proof) == (DEAD, True)


def test_a_stray_beside_the_groups_new_job_is_unknown(host: Host) -> None:
    host.heir(900)
    host.fake.add(901, ppid=900, groups=[GID])
    host.fake.add(700, ppid=1, groups=[GID])
    found = host.verdict()
    assert (found.state, "700" in found.proof) == (UNKNOWN, True)


@pytest.mark.parametrize("config", ["", "add_grp_id=\n", "add_grp_id=x\n", "job_id=3\n"])
def test_a_shepherd_whose_group_cannot_be_read_is_no_heir(host: Host, config: str) -> None:
    host.fake.shepherd(900, host.spool("900.1", config))
    host.fake.add(901, ppid=900, groups=[GID])
    assert host.verdict().state == UNKNOWN


def test_a_job_that_names_the_group_in_its_arguments_is_no_heir(host: Host) -> None:
    cwd = host.spool("900.1", f"add_grp_id=65499\njob_arg1=x\nadd_grp_id={GID}\n")
    host.fake.shepherd(900, cwd)
    host.fake.add(901, ppid=900, groups=[GID])
    assert host.verdict().state == ALIVE


def test_a_simulated_job_is_judged_by_its_session_and_needs_no_execd(host: Host) -> None:
    host.fake.remove(EXECD)
    host.lock = Lock("x", record(add_grp_id=0, sid=500), "")
    assert host.verdict(True).state == DEAD
    host.fake.add(700, session=500)
    assert host.verdict(True).state == ALIVE


def test_a_job_without_a_group_is_never_proven_dead(host: Host) -> None:
    host.lock.owner = record(add_grp_id=0)
    assert host.verdict().state == UNKNOWN
    host.fake.shepherd(500, host.spool("12.1"))
    assert host.verdict().state == ALIVE


def test_of_a_job_without_a_group_nobody_knows_that_nothing_is_left(host: Host) -> None:
    """Its epilog gives no lock back: a process in a scope of systemd would be of no job."""
    host.lock.owner = record(add_grp_id=0)
    assert "no supplementary group" in host.left().doubt


# --- what a job left behind -----------------------------------------------------------------------


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node with the job's shepherd, 500, and a process of its group, 700."""
    made = box_with_shepherd(tmp_path)
    shepherd(made, 500, f"add_grp_id={GID}\n")
    made.proc.add(700, groups=[GID])
    return made


def shepherd(box: Box, pid: int, config: str) -> Path:
    """Let a shepherd run in a folder of execd's; return its config."""
    folder = box.root / "active_jobs" / f"{pid}.1"
    folder.mkdir(parents=True)
    (folder / "config").write_text(config)
    box.proc.shepherd(pid, folder)
    return folder / "config"


def look(box: Box) -> ProcessScan:
    return ProcessScan(Proc(str(box.proc.root)))


def members(box: Box, scan: ProcessScan | None = None, **keys: str) -> JobProcesses:
    held = Lock(bus(0), record(add_grp_id=GID), "")
    node = box.node()
    for key, value in keys.items():
        setattr(node.settings, key, value)
    return find_job_processes(held, scan or look(box), SgeMembers(node))


def left(box: Box, scan: ProcessScan | None = None) -> list[int]:
    """Return what is the job's for sure; whatever carries its group keeps the lock all the same."""
    found = members(box, scan)
    assert found.reason()
    return list(found.pids)


def test_where_its_group_may_have_been_missed_nobody_is_a_doubt(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.proc.remove(700)
    assert members(box).reason() == ""
    monkeypatch.setattr(
        ProcessScan, "why_blind_about", lambda _, uid, gid=0: f"group {gid} was missed" * bool(gid)
    )
    assert members(box).reason() == f"group {GID} was missed"


def test_a_shepherd_whose_folder_may_not_be_seen_may_have_any_group(box: Box) -> None:
    shepherd(box, 501, f"add_grp_id={GID + 1}\n")
    (box.proc.root / "501/cwd").unlink()
    assert left(box) == []


def test_a_shepherd_that_ended_meanwhile_has_no_group(box: Box) -> None:
    shepherd(box, 501, "")
    scan = look(box)
    scan.statuses()
    box.proc.remove(501)
    box.proc.add(501, "sge_shepherd", state="Z")
    assert left(box, scan) == [700]


def test_a_folder_of_that_name_which_a_user_made_is_no_jobs(box: Box, tmp_path: Path) -> None:
    """A fork of a shepherd is in the user's folder when it becomes the job."""
    forged = tmp_path / "home/active_jobs/1.1"
    forged.mkdir(parents=True)
    (forged / "config").write_text(f"add_grp_id={GID}\n")
    box.proc.execd(box.root)
    box.proc.shepherd(501, forged)
    assert left(box) == [700]
    (forged / "config").unlink()
    assert left(box) == [700]
    box.proc.remove(EXECD)  # for all that is known its jobs were there
    assert left(box) == []


def test_what_a_shepherd_forks_to_become_a_hook_is_no_other_jobs_shepherd(
    box: Box, tmp_path: Path
) -> None:
    """It hangs in a FIFO that a user has made of the job's output, its shepherd alive or not."""
    (tmp_path / "home").mkdir()
    places = (500, "active_jobs/500.1"), (500, "home"), (1, "home")
    for pid, (above, place) in enumerate(places, 501):
        box.proc.add(pid, "sge_shepherd", ppid=above, uids=(0,) * 4, cwd=tmp_path / place)
    assert left(box) == [700]
    (box.proc.root / str(EXECD) / "cwd").unlink()
    assert left(box) == [700]


def test_in_a_look_that_ran_out_of_time_no_group_proves_anything(box: Box) -> None:
    scan = look(box)
    scan.statuses()
    scan.partial = True
    assert left(box, scan) == []


def test_an_epilog_in_the_jobs_own_cgroup_is_not_what_is_left(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.proc.add(os.getpid(), ppid=500)
    box.proc.add(701, state="Z")
    found = [os.getpid(), 500, 701, 702]  # 702 has ended

    monkeypatch.setattr(job, "confined_pids", returning(found))
    box.proc.remove(700)
    assert members(box, isolation="cgroup").reason() == ""
    box.proc.add(703)
    found.append(703)
    assert members(box, isolation="cgroup").pids == {703: "is in the job's cgroup"}


def test_a_cgroup_that_cannot_be_read_keeps_the_lock(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = raising(PermissionError(13, "denied"))
    with monkeypatch.context() as patch:
        patch.setattr(job, "confined_pids", denied)
        assert members(box, isolation="cgroup").pids == {700: f"carries the job's group {GID}"}
        box.proc.remove(700)
        assert "cannot be read" in members(box, isolation="cgroup").doubt
    monkeypatch.setattr(job, "confined_pids", lambda *_: [700])
    monkeypatch.setattr(Proc, "finished", denied)
    assert "of the job's cgroup cannot be seen" in members(box, isolation="cgroup").doubt


@pytest.mark.attack
def test_every_shepherd_is_asked_once_a_look_and_for_the_head_of_its_configuration(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: jobs without GPUs, with 130,000 arguments each: an epilog with 8 GPUs took 29 s.

    Stopped by: one reading of each shepherd's first 4 KiB a look, however many locks are judged.
    """
    config = shepherd(box, 501, f"add_grp_id={GID + 1}\n" + "job_arg=x\n" * 200_000)
    reads: list[int] = []
    read = os.read

    def counted(fd: int, size: int) -> bytes:
        data = read(fd, size)
        if os.readlink(f"/proc/self/fd/{fd}") == str(config):
            reads.append(len(data))
        return data

    monkeypatch.setattr(os, "read", counted)
    box.proc.remove(500)
    judge = judge_of(box.node())
    for number in range(8):
        held = Lock(bus(number), record(add_grp_id=GID), "")
        assert (judge.verdict(held).state, list(judge.job_processes(held).pids)) == (ALIVE, [700])
    assert reads == [4096]


@pytest.mark.attack
def test_a_set_user_id_program_under_the_name_of_a_shepherd_has_no_group(
    box: Box, tmp_path: Path
) -> None:
    """Tried: links sge_execd and sge_shepherd to sudo, in folders that name another job's group, so
    that its dead owner's lock is never freed.

    Stopped by: the program that runs.
    """
    forged = tmp_path / "home/active_jobs/1.1"
    forged.mkdir(parents=True)
    (forged / "config").write_text(f"add_grp_id={GID}\n")
    root = (0, 0, 0, 0)
    box.proc.add(601, "sge_execd", uids=root, cwd=tmp_path / "home", exe="/usr/bin/sudo")
    box.proc.add(602, "sge_shepherd", uids=root, cwd=forged, exe="/usr/bin/sudo")
    assert left(box) == [700]
