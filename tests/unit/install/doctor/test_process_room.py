# SPDX-License-Identifier: Apache-2.0
"""Doctor warns where one user's jobs can take every process that shepherds need."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.doctor.check import WARNING
from gpulock.install.doctor.process_room import check_process_room, read_cgroup_room
from gpulock.node.settings import Settings

EXECD = 77
LIMITS = "Limit Soft Hard Units\nMax processes {0} {0} processes\nMax open files 1 2 files\n"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Return a node of 32768 processes, whose jobs inherit a limit of 90000."""
    kernel = tmp_path / "proc/sys/kernel"
    kernel.mkdir(parents=True)
    (kernel / "pid_max").write_text("32768\n")
    (kernel / "threads-max").write_text("180000\n")
    execd = tmp_path / f"proc/{EXECD}"
    execd.mkdir()
    (execd / "limits").write_text(LIMITS.format(90000))
    (execd / "cgroup").write_text("0::/system.slice/sgeexecd.service\n")
    return tmp_path


def advice(node: Path, params: str = "none") -> list[tuple[str, str]]:
    """Return the state and the advice of what doctor finds."""
    settings = Settings({"PROC_ROOT": str(node / "proc"), "SYS_ROOT": str(node / "sys")})
    found = check_process_room({"execd_params": params}, settings, EXECD)
    return [(one.state, one.do.partition(" in ")[0]) for one in found]


def test_a_limit_above_what_the_kernel_has_is_told(node: Path) -> None:
    assert advice(node) == [(WARNING, "set H_MAXPROC=8192")]


@pytest.mark.parametrize("params", ["H_MAXPROC=8192", "KEEP_ACTIVE=true,h_maxproc=100"])
def test_a_limit_that_leaves_room_is_well(node: Path, params: str) -> None:
    assert advice(node, params) == []


@pytest.mark.parametrize("word", ["unlimited", "32768"])
def test_without_a_limit_of_execds_the_inherited_one_counts(node: Path, word: str) -> None:
    (node / f"proc/{EXECD}/limits").write_text(LIMITS.format(word))
    assert len(advice(node, "H_MAXPROC=infinity")) == 1

    (node / f"proc/{EXECD}/limits").write_text(LIMITS.format(32767))
    assert advice(node) == []


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_of_the_cgroups_above_counts(node: Path, version: int) -> None:
    """TasksMax of a service is 15 % of what the node can have, for all its jobs together."""
    top = node / "sys/fs/cgroup" / ("pids" if version == 1 else "")
    (service := top / "system.slice/sgeexecd.service").mkdir(parents=True)
    (service / "pids.max").write_text("max\n")
    (service.parent / "pids.max").write_text("4915\n")
    name = "8:cpu,pids:" if version == 1 else "0::"
    text = f"4:memory:/x\n{name}/system.slice/sgeexecd.service\n"

    assert read_cgroup_room(text, node / "sys/fs/cgroup") == 4915
    (node / f"proc/{EXECD}/cgroup").write_text(text)
    assert advice(node, "H_MAXPROC=5000") == [(WARNING, "set H_MAXPROC=1228")]
    assert advice(node, "H_MAXPROC=1228") == []
