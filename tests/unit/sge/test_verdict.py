# SPDX-License-Identifier: Apache-2.0
"""Whether a Grid Engine job is alive, from this node alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.sge.members import SgeMembers
from gpulock.sge.verdict import make_sge_rule
from gpulock.store.locks import Lock
from gpulock.store.verdicts import ALIVE, DEAD, UNKNOWN, Verdict
from tests.support.faults import fail_at
from tests.support.trees import BOOT, EXECD, FakeProc, record

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


@pytest.mark.parametrize("name", [") (", "a) S 1 500", "sge_shepherd) Z 1"])
def test_a_name_with_parentheses_hides_no_shepherd(host: Host, name: str) -> None:
    host.fake.add(500, name, start=1000)
    assert host.verdict().state == ALIVE


def test_a_zombie_carrier_is_over_unless_its_threads_go_on(host: Host) -> None:
    host.fake.add(700, state="Z", groups=[GID])
    assert host.verdict().state == DEAD
    host.fake.add(700, state="Z", groups=[GID], threads={700: "Z", 701: "S"})
    assert host.verdict().state == ALIVE


def test_an_anchor_keeps_the_job_and_so_does_its_group(host: Host) -> None:
    host.lock.anchors = [(600, 2000, 65401)]
    assert host.verdict().state == DEAD
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
    assert host.verdict().state == UNKNOWN


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


def test_a_record_with_a_start_time_no_kernel_has_is_dead_only_by_its_group(host: Host) -> None:
    host.fake.shepherd(500, host.spool("12.1", "add_grp_id=65499\n"))
    host.lock = Lock("x", record(start=10**30), "")
    assert host.verdict().state == DEAD
    host.fake.add(700, groups=[GID])
    assert host.verdict().state == ALIVE


def test_a_job_without_a_group_is_never_proven_dead(host: Host) -> None:
    host.lock.owner = record(add_grp_id=0)
    assert host.verdict().state == UNKNOWN
    host.fake.shepherd(500, host.spool("12.1"))
    assert host.verdict().state == ALIVE
