# SPDX-License-Identifier: Apache-2.0
"""The last guard: processes of the job that are left, by group, task and session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.alloc import device_users
from gpulock.alloc.job_processes import find_job_processes
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.node.devices import MAJOR, Device
from gpulock.node.procfs import device_file_key
from gpulock.node.settings import Settings
from gpulock.sge.members import SgeMembers
from gpulock.store.locks import Lock
from tests.support.trees import FakeProc, record


def left_in_group(fake: FakeProc, lock: Lock) -> str:
    node = Node(Settings({"PROC_ROOT": str(fake.root)}))
    return find_job_processes(lock, ProcessScan(node.proc), SgeMembers(node)).reason()


def test_a_task_that_runs_is_left(fake: FakeProc) -> None:
    lock = Lock("x", record(), "")
    lock.anchors = [(600, 5, 0)]
    fake.add(600, "sge_shepherd", start=5)
    assert "600" in left_in_group(fake, lock)


def test_the_session_of_another_user_under_that_number_is_not_the_owners(fake: FakeProc) -> None:
    """A number comes round: anybody may wait for it, fork, and lead a session of it."""
    lock = Lock("x", record(scheduler="process", add_grp_id=0, sid=500, uid=1000), "")
    fake.add(500, session=500)  # its own process, which may be what gives it back
    fake.add(700, session=500, uids=(1001,) * 4)
    assert left_in_group(fake, lock) == ""
    fake.add(701, session=500, uids=(0, 1000, 0, 0))  # a set-user-id program of the owner's
    assert "701" in left_in_group(fake, lock)


def test_anchors_that_cannot_be_read_count_as_something_left(fake: FakeProc) -> None:
    assert left_in_group(fake, Lock("x", record(), "its anchors: garbage")) != ""


def mig(root: Path, table: str) -> list[tuple[int, int, int]]:
    """Return what an instance's nodes look like, with the driver's table of their minors."""
    (root / "driver-caps").mkdir()
    (root / "driver-caps/mig-minors").write_text(table)
    (root / "dev/nvidia-caps").mkdir(parents=True)
    for name in ("nvidia7", "nvidia-caps/nvidia-cap21", "nvidia-caps/nvidia-cap22"):
        (root / "dev" / name).touch()
    device = Device("0000:3b:00.0.gi2.ci0", 0)
    device.minor = 7
    return device_users.device_node_keys(device, str(root / "dev"), str(root / "driver"))


def key(path: Path) -> tuple[int, int, int]:
    return device_file_key(path.stat())


def test_an_instance_is_recognised_by_its_own_access_nodes(tmp_path: Path) -> None:
    table = "config 1\ngpu7/gi2/access 21\ngpu7/gi2/ci0/access 22\ngpu7/gi1/access 12\n"
    caps = tmp_path / "dev/nvidia-caps"
    assert mig(tmp_path, table) == [key(caps / "nvidia-cap21"), key(caps / "nvidia-cap22")]


@pytest.mark.parametrize(
    "table",
    [
        "",
        "gpu7/gi2/access 21\n",
        "gpu7/gi2/access 21\ngpu7/gi2/ci0/access 99\n",
        "gpu7/gi2/access 21\ngpu7/gi2/access 12\ngpu7/gi2/ci0/access 22\n",
        "gpu17/gi2/access 21\ngpu7/gi12/access 21\ngpu7/gi2/ci0/access 22\n",
    ],
)
def test_an_instance_without_known_nodes_is_recognised_by_its_card(
    tmp_path: Path, table: str
) -> None:
    found = mig(tmp_path, table)
    assert key(tmp_path / "dev/nvidia7") in found


def test_a_card_without_a_node_is_recognised_by_nvidias_number(tmp_path: Path) -> None:
    card = Device("0000:3b:00.0", 0)
    assert device_users.device_node_keys(card, str(tmp_path)) == []
    card.minor = 0
    keys = device_users.device_node_keys(card, str(tmp_path))
    assert keys == [(os.makedev(MAJOR, 0), 0, 0)]
