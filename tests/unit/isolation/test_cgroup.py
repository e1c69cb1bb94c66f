# SPDX-License-Identifier: Apache-2.0
"""Which cgroups a node has, and which are ours."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN
from gpulock.isolation import bpf, job, sessions, tree
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.node.procfs import Proc
from tests.support.faults import fail_at, raising, refusal
from tests.support.trees import Box


def make(top: Path, *files: str) -> str:
    """Make empty files below sys/fs/cgroup; return SYS_ROOT."""
    for name in files:
        path = top / "fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(top)


@pytest.mark.parametrize("place", ["", "unified/"])
def test_version_2_is_where_it_is_mounted_also_beside_version_1(tmp_path: Path, place: str) -> None:
    files = [f"{place}{name}" for name in ("cgroup.procs", "cgroup.controllers")]
    top = make(tmp_path, "devices/devices.deny", *files)
    assert tree.find_cgroup_top(top) == f"{top}/fs/cgroup/{place}".rstrip("/")


@pytest.mark.parametrize("end", ["\v", "\f", "\r", "\x1c", "\x85", "\u2028", "\u2029"])
def test_a_cgroup_that_a_user_named_is_no_line_of_its_own(end: str) -> None:
    """The kernel refuses a newline in a name (cgroup_mkdir), and nothing else."""
    text = f"4:devices:/c{end}0::/d\n0::/user.slice/a{end}0::/system.slice/b\n"
    assert tree.parse_cgroup_path(text) == f"/user.slice/a{end}0::/system.slice/b"


@pytest.mark.parametrize(
    ("line", "kind"),
    [("0::/../../x", BROKEN), ("0::/a (deleted)", UNKNOWN), ("4:devices:/a", BROKEN)],
    ids=["away", "gone", "none"],
)
def test_a_cgroup_that_cannot_be_reached_is_refused(tmp_path: Path, line: str, kind: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text(f"{line}\n")

    assert refusal(lambda: tree.process_cgroup_folder("/sys", Proc(str(tmp_path)), 7)).kind == kind


def test_a_cgroup_that_may_not_be_seen_is_unknown_and_one_that_is_gone_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tree.remove_cgroup(str(tmp_path / "gone")) is True
    fail_at(monkeypatch, "open", "/7/cgroup", PermissionError(13, "denied"))
    found = refusal(lambda: tree.process_cgroup_folder("/sys", Proc(str(tmp_path)), 7))
    assert (found.kind, "denied" in found.why) == (UNKNOWN, True)


@pytest.mark.parametrize(
    "name",
    ["gpulock-lab", "gpulock-1.1-x-9", "gpulock-1.1-5-", "other-1.1-5-9", "gpulock-5-9", "x"],
)
def test_any_other_name_is_not_ours(name: str) -> None:
    assert tree.parse_cgroup_name(name) is None


@pytest.fixture
def confining(tmp_path: Path) -> Box:
    """A node with cgroups, and a process 500."""
    box = Box(tmp_path)
    make(Path(box.settings["SYS_ROOT"]), "cgroup.procs", "cgroup.controllers")
    box.proc.add(500, "sge_shepherd", start=1000)
    (box.proc.root / "devices").write_text("Character devices:\n")
    return box


def service_of(box: Box, path: str) -> Path:
    """Let process 500 be in a cgroup; return its folder."""
    (box.proc.root / "500/cgroup").write_text(f"0::{path}\n")
    folder = Path(f"{box.settings['SYS_ROOT']}/fs/cgroup{path}")
    folder.mkdir(parents=True)
    return folder


def test_a_process_is_moved_where_all_but_its_devices_is_closed_already_after_logins(
    confining: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = service_of(confining, "/execd.service") / "gpulock-12.1-500-1000"
    done: list[tuple[str, object]] = []
    mark = confining.records / tree.MARK  # or nobody would open them again
    monkeypatch.setattr(
        sessions, "close_login_cgroups", lambda _: done.append(("logins", mark.exists()))
    )

    def attach(folder: str, _: bytes) -> None:
        done.append((folder, tree.read_cgroup_folders(node.store)))
        (own / "cgroup.procs").touch()

    monkeypatch.setattr(bpf, "attach_device_program", attach)

    node = confining.node()
    job.begin_job_isolation(node, job.IsolatedJob("12.1", 500, 1000), [])

    assert done == [("logins", True), (str(own), [str(own.parent)])]
    assert (own / "cgroup.procs").read_text() == "500"


@pytest.mark.parametrize(
    ("start", "move", "kind"),
    [
        (1000, raising(ProcessLookupError()), UNKNOWN),
        (1001, print, UNKNOWN),
        (1000, raising(OSError(errno.EIO, "worn out")), BROKEN),
    ],
)
def test_a_process_that_ends_while_it_is_confined_is_no_fault_of_the_node(
    confining: Box,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    move: Callable[..., None],
    kind: str,
) -> None:
    """Its number may be another's by then."""
    service_of(confining, "/execd.service")
    monkeypatch.setattr(bpf, "attach_device_program", lambda *_: None)
    monkeypatch.setattr(tree, "move_to_cgroup", move)
    own = job.IsolatedJob("12.1", 500, start)

    assert refusal(lambda: job.begin_job_isolation(confining.node(), own, [])).kind == kind


def test_where_slurm_moves_tasks_it_is_the_jobs_own_cgroup_that_is_closed(
    confining: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step daemon is in `slurm` of its step's folder, each task below `user`."""
    step = service_of(confining, "/system.slice/slurmstepd.scope/job_12/step_0/slurm").parent
    closed: list[str] = []
    marks: dict[str, bytes] = {}

    def close(folder: str, code: bytes) -> None:
        assert code == bpf.assemble_device_program(CLOSE_ALL_GPUS)
        closed.append(folder)

    def mark(folder: str, name: str, value: bytes) -> None:
        assert name == job.STEP_MARK
        marks[folder] = value

    monkeypatch.setattr(bpf, "attach_device_program", close)
    monkeypatch.setattr(os, "setxattr", mark)

    job.begin_job_isolation(confining.node(), job.IsolatedJob("12.0", 500, 1000), [])

    assert closed == [str(step.parent)]
    assert marks == {str(step): b"gpulock-12.0-500-1000"}
    assert list((step / "slurm").iterdir()) == []


@pytest.mark.parametrize(
    "folder",
    [
        "/slurmstepd.scope/job_12/step_0/user/gpulock-12.0-500-1000",
        "/execd.service/slurm/gpulock-12.0-500-1000",
    ],
)
def test_no_other_cgroup_is_taken_for_that_of_a_step_daemon(folder: str) -> None:
    assert job.slurm_step_folder(folder) == ""
