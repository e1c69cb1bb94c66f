# SPDX-License-Identifier: Apache-2.0
"""What a Grid Engine job left behind: its group proves it while no other living job may have it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.alloc.process_scan import ProcessScan
from gpulock.isolation import job
from gpulock.node.procfs import Proc
from gpulock.sge.remains import SgeLeftoverFinder, find_job_group_processes
from gpulock.store.locks import Lock
from tests.support.trees import Box, box_with_shepherd, bus, record

GID = 65400


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


def left(box: Box, scan: ProcessScan | None = None) -> list[int]:
    held = Lock(bus(0), record(add_grp_id=GID), "")
    return list(find_job_group_processes(held, scan or look(box)))


def test_the_jobs_own_group_proves_a_process_while_its_shepherd_runs(box: Box) -> None:
    shepherd(box, 501, f"add_grp_id={GID + 1}\n")
    assert left(box) == [700]


def test_a_group_that_another_job_has_by_now_proves_nothing(box: Box) -> None:
    shepherd(box, 501, f"add_grp_id={GID}\n")
    assert left(box) == []


@pytest.mark.parametrize("config", ["", "add_grp_id=\n", "add_grp_id=x\n", "job_id=13\n"])
def test_a_living_shepherd_whose_group_cannot_be_read_may_have_any(box: Box, config: str) -> None:
    shepherd(box, 501, config)
    assert left(box) == []


def test_a_shepherd_whose_folder_may_not_be_seen_may_have_any_group(box: Box) -> None:
    shepherd(box, 501, f"add_grp_id={GID + 1}\n")
    (box.proc.root / "501/cwd").unlink()
    assert left(box) == []


def test_a_shepherd_that_ended_meanwhile_has_no_group(box: Box) -> None:
    shepherd(box, 501, "")
    scan = look(box)
    scan.statuses()
    box.proc.remove(501)
    (box.proc.root / "501").mkdir()
    (box.proc.root / "501/cwd").symlink_to(box.root / "active_jobs/501.1")
    assert left(box, scan) == [700]


def test_a_folder_of_that_name_which_a_user_made_is_no_jobs(box: Box, tmp_path: Path) -> None:
    """A fork of a shepherd is in the user's folder when it becomes the job."""
    forged = tmp_path / "home/active_jobs/1.1"
    forged.mkdir(parents=True)
    (forged / "config").write_text(f"add_grp_id={GID}\n")
    box.proc.execd(box.root)
    box.proc.shepherd(501, forged)
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

    def pids(*_: object) -> list[int]:
        return found

    monkeypatch.setattr(job, "isolated_job_pids", pids)
    held = Lock(bus(0), record(add_grp_id=GID), "")
    finder = SgeLeftoverFinder(box.node())
    assert finder.describe_leftover(held, look(box)) == ""
    found.append(700)
    assert "process 700" in finder.describe_leftover(held, look(box))


def test_a_cgroup_that_cannot_be_read_keeps_the_lock(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> list[int]:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(job, "isolated_job_pids", denied)
    held = Lock(bus(0), record(add_grp_id=GID), "")
    assert "cannot be read" in SgeLeftoverFinder(box.node()).describe_leftover(held, look(box))
