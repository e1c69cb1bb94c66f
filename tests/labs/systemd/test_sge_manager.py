# SPDX-License-Identifier: Apache-2.0
"""A job of Grid Engine that leaves its cgroup by the user's own systemd, on cgroup version 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labs.systemd.gpulock import booted_node, make_package
from tests.labs.systemd.sge_node import SgeNode
from tests.labs.systemd.slurm_node import HOME
from tests.labs.systemd.users_manager import (
    assert_left_with_its_gpu,
    child_of,
    leaving_with_its_gpu,
)
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]


@pytest.fixture
def sge(tmp_path: Path) -> Iterator[SgeNode]:
    with booted_node(make_package(tmp_path / "gpulock"), "unified") as node:
        made = SgeNode(node)
        made.up(tmp_path)
        yield made


def test_a_gpu_that_is_open_below_the_users_own_manager_stays_locked(sge: SgeNode) -> None:
    """Tried: `systemd-run --user --scope` takes a process with its GPU out of the job's cgroup; the
    node is bound to a file of the user's.

    Stopped by: an empty cgroup ends no question: the process carries the job's group, and each open
    file is asked for its device.
    """
    job = sge.submit(leaving_with_its_gpu(sge.machine), "-l", "gpu=1")
    (card,) = wait_until(lambda: sge.held_by(job), why="a GPU for the job")
    sge.machine.write(f"{HOME}/card", card)
    pid = child_of(sge.wait_said(job, "child="))
    sge.wait_over(job)
    assert_left_with_its_gpu(sge.machine, pid)
    reaped = sge.node.gpulock("reap")
    assert f"process {pid} carries the job's group" in reaped
    assert sge.held_by(job) == {card}
    why = sge.node.gpulock("why", f"job {job}")
    assert f"carried by {pid} (python3)" in why
    assert f"{card.removeprefix('nvidia')}: {pid} (python3)" in why
    sge.run("kill", "-KILL", str(pid))
    wait_until(
        lambda: sge.node.gpulock("reap") and not sge.held_by(job),
        why="the GPU to be free",
    )
