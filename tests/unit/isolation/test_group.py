# SPDX-License-Identifier: Apache-2.0
"""ISOLATION=group: whose a device's node is follows from the locks, whatever was cut short."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.isolation import group, job
from gpulock.node.devices import Device
from gpulock.store import atomic
from tests.support.claims import ask
from tests.support.trees import OTHER_BOOT, Box, judge_of, record, soon

GID, OTHER_GID = 65400, 65401


@pytest.fixture
def box(tmp_path: Path) -> Box:
    made = Box(tmp_path)
    made.proc.add(500, "sge_shepherd", start=1000)
    return made


class Ownership:
    """What chown was asked for: nobody but root may give a file away."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups: dict[str, int] = {}
        self.calls: list[tuple[str, str]] = []
        self.fails_at = -1
        self._chmod = os.chmod
        self._lstat = os.lstat
        patch.setattr(os, "chown", self.chown)
        patch.setattr(os, "chmod", self.chmod)
        patch.setattr(os, "lstat", self.lstat)

    def chown(self, path: str, uid: int, gid: int) -> None:
        self._count("chown", path)
        assert uid == 0
        self.groups[path] = gid

    def chmod(self, path: str, mode: int) -> None:
        self._count(f"chmod {mode:o}", path)
        self._chmod(path, mode)

    def lstat(self, path: str, *, dir_fd: int | None = None) -> os.stat_result:
        found = list(self._lstat(path, dir_fd=dir_fd))
        if os.path.basename(os.path.dirname(path)) == "dev":
            found[stat.ST_UID], found[stat.ST_GID] = 0, self.groups.get(path, 0)
        return os.stat_result(found)

    def _count(self, call: str, path: str) -> None:
        if len(self.calls) == self.fails_at:
            raise OSError("cut short")
        self.calls.append((call, path))

    def open_to(self, box: Box) -> dict[str, int]:
        """Return the group of every node that a group may open."""
        paths = sorted(box.dev.iterdir())
        assert all(not path.stat().st_mode & 0o007 for path in paths), "a node is everybody's"
        opens = [path for path in paths if path.stat().st_mode & 0o060]
        return {p.name: gid for p in opens if (gid := self.groups.get(str(p), 0))}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Ownership:
    return Ownership(monkeypatch)


def test_a_jobs_devices_are_its_groups_and_all_others_roots(box: Box, files: Ownership) -> None:
    ask(box, 2)
    box.proc.add(501, "sge_shepherd", start=1001)
    ask(box, 1, job_id="13", pid=501, start=1001, add_grp_id=OTHER_GID)

    node = box.node()
    wanted = group.apply_device_groups(node, node.devices())

    assert wanted == {0: GID, 1: GID, 2: OTHER_GID}
    assert files.open_to(box) == {"nvidia0": GID, "nvidia1": GID, "nvidia2": OTHER_GID}


def test_the_first_job_of_a_boot_may_have_no_gpu_and_finds_every_node_closed(
    box: Box, files: Ownership
) -> None:
    node = box.node()
    node.store.check(make=True)

    assert job.sync_device_groups(node, node.devices(), soon()) == {}

    assert files.open_to(box) == {}
    assert node.store.boot_id() == node.boot_id


def test_where_the_locks_of_this_boot_were_lost_no_node_is_closed_to_who_may_hold_it(
    box: Box, files: Ownership
) -> None:
    node = box.node()
    node.store.check(make=True)
    (box.state / "boot_id").write_text(node.boot_id)

    with pytest.raises(Refusal) as caught:
        job.sync_device_groups(node, node.devices(), soon())

    assert caught.value.kind == UNKNOWN
    assert files.calls == []


def test_what_is_right_already_is_not_touched(box: Box, files: Ownership) -> None:
    ask(box, 2)
    node = box.node()
    group.apply_device_groups(node, node.devices())
    files.calls.clear()

    group.apply_device_groups(node, node.devices())

    assert files.calls == []


def test_a_node_is_closed_before_it_changes_hands(box: Box, files: Ownership) -> None:
    ask(box, 1)
    node = box.node()

    group.apply_device_groups(node, node.devices())

    path = str(box.dev / "nvidia0")
    assert [call for call, place in files.calls if place == path] == [
        "chmod 600",
        "chown",
        "chmod 660",
    ]


class Unreadable:
    """A record of which so many reads fail."""

    def __init__(self, patch: pytest.MonkeyPatch, path: Path, times: int) -> None:
        self._path, self._left = str(path), times
        self._read = atomic.read_text
        patch.setattr(atomic, "read_text", self.read)

    def read(self, path: str, limit: int = 1 << 16, dir_fd: int | None = None) -> str:
        if path == self._path and self._left:
            self._left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._read(path, limit, dir_fd)


def test_a_record_that_fails_to_be_read_once_does_not_close_its_jobs_device(
    box: Box, files: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(box, 2)
    node = box.node()
    group.apply_device_groups(node, node.devices())
    path = box.lock / "locks" / node.devices()[0].id / "owner"
    Unreadable(monkeypatch, path, 1)
    assert group.apply_device_groups(node, node.devices()) == {0: GID, 1: GID}
    assert files.open_to(box) == {"nvidia0": GID, "nvidia1": GID}


def test_nodes_stay_as_they_are_where_a_record_cannot_be_read(
    box: Box, files: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(box, 2)
    node = box.node()
    group.apply_device_groups(node, node.devices())
    path = box.lock / "locks" / node.devices()[0].id / "owner"
    Unreadable(monkeypatch, path, 2)
    with pytest.raises(OSError, match="Input/output error"):
        group.apply_device_groups(node, node.devices())
    assert files.open_to(box) == {"nvidia0": GID, "nvidia1": GID}


def test_nodes_stay_as_they_are_where_a_lock_is_lost(box: Box, files: Ownership) -> None:
    ask(box, 2)
    node = box.node()
    group.apply_device_groups(node, node.devices())
    shutil.rmtree(box.lock / "locks" / node.devices()[0].id)
    with pytest.raises(Refusal, match="were lost"):
        group.apply_device_groups(node, node.devices())
    assert files.open_to(box) == {"nvidia0": GID, "nvidia1": GID}


def test_a_record_that_nobody_understands_opens_nothing(box: Box, files: Ownership) -> None:
    ask(box, 2)
    node = box.node()
    group.apply_device_groups(node, node.devices())
    (box.lock / "locks" / node.devices()[0].id / "owner").write_text("gpulock-owner 99\n")
    assert group.apply_device_groups(node, node.devices()) == {1: GID}
    assert files.open_to(box) == {"nvidia1": GID}


def test_a_held_device_is_its_jobs_also_where_the_driver_does_not_show_it_now(
    box: Box, files: Ownership
) -> None:
    ask(box, 2)
    node = box.node()
    group.apply_device_groups(node, node.devices()[1:])
    assert files.open_to(box) == {"nvidia0": GID, "nvidia1": GID}


@pytest.mark.parametrize("change", ["gone", "another process", "another boot"])
def test_a_dead_jobs_lock_opens_nothing_to_who_has_its_group_now(
    box: Box, files: Ownership, change: str
) -> None:
    ask(box, 2)
    node = box.node()
    group.apply_device_groups(node, node.devices())
    if change == "gone":
        box.proc.remove(500)
    elif change == "another process":
        box.proc.add(500, "sge_shepherd", start=2000)
    else:
        box.proc.boot(OTHER_BOOT)

    node = box.node()
    group.apply_device_groups(node, node.devices())

    assert len(box.locks()) == 2
    assert files.open_to(box) == {}


@pytest.mark.parametrize("number", range(12))
def test_the_next_look_repairs_what_was_cut_short_at_any_call(
    box: Box, files: Ownership, number: int
) -> None:
    ask(box, 2)
    node = box.node()
    files.fails_at = number
    with pytest.raises(OSError, match="cut short"):
        group.apply_device_groups(node, node.devices())

    files.fails_at = -1
    group.apply_device_groups(node, node.devices())

    assert files.open_to(box) == {"nvidia0": GID, "nvidia1": GID}


def test_a_group_that_only_its_own_job_will_have_is_taken(box: Box) -> None:
    box.proc.add(700, "sleep", groups=(OTHER_GID,))

    group.check_group_unused(judge_of(box.node()), GID)


def test_a_group_that_an_older_jobs_process_carries_is_refused(box: Box) -> None:
    box.proc.add(700, "sleep", groups=(GID,))

    with pytest.raises(Refusal, match="process 700") as told:
        group.check_group_unused(judge_of(box.node()), GID)

    assert told.value.kind == UNKNOWN


def test_a_task_whose_group_is_not_its_jobs_is_refused() -> None:
    device = Device("0000:01:00.0", 0)
    device.minor = 0

    group.check_task_group([device], GID, {0: GID})
    with pytest.raises(Refusal, match="slave task"):
        group.check_task_group([device], OTHER_GID, {0: GID})


def test_a_job_without_a_group_and_an_instance_are_refused() -> None:
    instance = Device("0000:01:00.0.gi1.ci0", 0)

    with pytest.raises(Refusal) as none:
        group.check_group_grant([], 0)
    with pytest.raises(Refusal) as shared:
        group.check_group_grant([instance], GID)

    assert (none.value.kind, shared.value.kind) == (UNKNOWN, INVALID_REQUEST)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ResmanDebugLevel: 1\nModifyDeviceFiles: 0\n", "0"),
        ("ModifyDeviceFiles: 1\n", "1"),
        ("NotModifyDeviceFiles: 0\n", ""),
        ("", ""),
    ],
)
def test_the_driver_tells_whether_it_opens_its_nodes_again(
    tmp_path: Path, text: str, value: str
) -> None:
    (tmp_path / "params").write_text(text)

    assert group.parse_modify_device_files(text) == value
    if value == "0":
        group.check_modify_device_files(str(tmp_path))
        return
    with pytest.raises(Refusal) as told:
        group.check_modify_device_files(str(tmp_path))
    assert "NVreg_ModifyDeviceFiles=0" in told.value.do


def test_a_driver_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as told:
        group.check_modify_device_files(str(tmp_path))

    assert told.value.kind == BROKEN


def test_an_administrators_lock_is_nobodys_group(box: Box, files: Ownership) -> None:
    ask(box, 1, add_grp_id=0)

    node = box.node()

    assert group.apply_device_groups(node, node.devices()) == {}
    assert record().add_grp_id == GID
