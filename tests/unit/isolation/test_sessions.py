# SPDX-License-Identifier: Apache-2.0
"""The ways round a job's cgroup are closed, whatever services come and go meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpulock.isolation import bpf, job, sessions, tree
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from tests.support.faults import raising
from tests.support.trees import Box

USERS, SSH, CRON = "user.slice", "system.slice/ssh.service", "system.slice/cron.service"
OTHERS = {f"system.slice/{name}.service" for name in ("sshd", "crond", "atd")}
SPARES_ROOT = bpf.assemble_device_program(CLOSE_ALL_GPUS, spare_root=True)


class Cgroups:
    """Cgroups that remember whether a program of ours is attached."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.attached: set[str] = set()
        self.faults: dict[str, list[int]] = {}
        self.vanishing: set[str] = set()
        for place in (USERS, SSH, CRON, *OTHERS):
            (top / place).mkdir(parents=True)

    def closed(self) -> set[str]:
        """Return the places that are closed."""
        return {os.path.relpath(folder, self.top) for folder in self.attached}

    def look(self, folder: str) -> bool:
        """Stand for bpf.is_attached."""
        self._fail(folder)
        return folder in self.attached

    def attach(self, folder: str, code: bytes) -> None:
        """Stand for bpf.attach."""
        assert code == SPARES_ROOT, "an administrator's nvidia-smi is closed out"
        self._fail(folder)
        self.attached.add(folder)

    def detach(self, folder: str) -> None:
        """Stand for bpf.detach."""
        self._fail(folder)
        self.attached.discard(folder)

    def _fail(self, folder: str) -> None:
        place = os.path.relpath(folder, self.top)
        if place in self.vanishing:
            shutil.rmtree(folder, ignore_errors=True)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if self.faults.get(place):
            number = self.faults[place].pop(0)
            raise OSError(number, os.strerror(number))


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    made = Cgroups(tmp_path)
    monkeypatch.setattr(bpf, "has_device_program", made.look)
    monkeypatch.setattr(bpf, "attach_device_program", made.attach)
    monkeypatch.setattr(bpf, "detach_device_programs", made.detach)
    return made


def test_all_that_are_there_are_closed_and_opened_again(
    cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(sessions.unclosed_login_cgroups(str(cgroups.top))) == 6

    sessions.close_login_cgroups(str(cgroups.top))
    assert cgroups.closed() == {USERS, SSH, CRON, *OTHERS}
    assert sessions.unclosed_login_cgroups(str(cgroups.top)) == []
    twice = raising(AssertionError("each job would attach one program more"))
    monkeypatch.setattr(bpf, "attach_device_program", twice)
    sessions.close_login_cgroups(str(cgroups.top))

    sessions.reopen_cgroups(sessions.login_cgroups(str(cgroups.top)))
    assert cgroups.closed() == set()


def test_a_service_that_stops_at_this_moment_is_nothing_to_close(cgroups: Cgroups) -> None:
    cgroups.vanishing.add(SSH)

    sessions.close_login_cgroups(str(cgroups.top))

    assert cgroups.closed() == {USERS, CRON, *OTHERS}


def test_one_that_cannot_be_closed_keeps_no_other_open(cgroups: Cgroups) -> None:
    cgroups.faults[USERS] = [errno.EPERM]

    with pytest.raises(PermissionError):
        sessions.close_login_cgroups(str(cgroups.top))

    assert cgroups.closed() == {SSH, CRON, *OTHERS}


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV])
def test_a_service_that_is_back_in_a_new_cgroup_is_to_be_tried_again(
    cgroups: Cgroups, number: int
) -> None:
    cgroups.faults[SSH] = [number]

    with pytest.raises(FileNotFoundError):
        sessions.close_login_cgroups(str(cgroups.top))
    assert cgroups.closed() == {USERS, CRON, *OTHERS}
    sessions.close_login_cgroups(str(cgroups.top))
    assert cgroups.closed() == {USERS, SSH, CRON, *OTHERS}


# --- slurmd, which runs users' login files --------------------------------------------------------

SLURMD = 700


class Node(Box):
    """A node with cgroups and slurmd in its service's."""

    def __init__(self, root: Path, cgroups: Cgroups) -> None:
        super().__init__(root, ISOLATION="cgroup")
        top = root / "sys/fs/cgroup"
        top.mkdir(parents=True)
        for name in ("cgroup.procs", "cgroup.controllers"):
            (top / name).touch()
        cgroups.top = top
        self.closed = cgroups.attached
        self.service = top / "system.slice/slurmd.service"
        self.service.mkdir(parents=True)
        self.moved: list[tuple[int, str]] = []
        self.slurmd("/system.slice/slurmd.service")

    def slurmd(self, path: str, pid: int = SLURMD) -> None:
        """Let slurmd be in a cgroup."""
        self.proc.add(pid, "slurmd", start=1000, uids=(0, 0, 0, 0))
        (self.proc.root / str(pid) / "cgroup").write_text(f"0::{path}\n")

    def slurmd_folder(self) -> str:
        """Return the cgroup that slurmd is in."""
        said = (self.proc.root / str(SLURMD) / "cgroup").read_text()
        return f"{self.root}/sys/fs/cgroup{said.removeprefix('0::').strip()}"

    def move(self, pid: int, folder: str) -> None:
        """Stand for tree.move_to_cgroup."""
        assert folder in self.closed, "it is moved before that is closed"
        self.moved.append((pid, folder))
        self.slurmd(folder.removeprefix(str(self.root / "sys/fs/cgroup")), pid)


@pytest.fixture
def node(tmp_path: Path, cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path / "node", cgroups)
    monkeypatch.setattr(tree, "move_to_cgroup", made.move)
    return made


def test_slurmd_is_closed_before_it_is_moved_and_only_once(node: Node, cgroups: Cgroups) -> None:
    closed = f"{node.service}/gpulock-slurmd-{SLURMD}-1000"

    for _ in range(2):
        sessions.close_launcher(node.node(), SLURMD)

    assert node.moved == [(SLURMD, closed)]
    assert cgroups.attached == {closed}


def test_two_prologs_at_once_close_slurmd_both(
    node: Node, cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first jobs of a slurmd start together: neither may drain the node."""
    closed = f"{node.service}/gpulock-slurmd-{SLURMD}-1000"
    real = os.mkdir
    other: list[str] = []

    def mkdir(path: str, mode: int = 0o777) -> None:
        """Let the other Prolog do all of it at this very call."""
        if path == closed and not other:
            other.append(path)
            sessions.close_launcher(node.node(), SLURMD)
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    sessions.close_launcher(node.node(), SLURMD)

    assert other == [closed]
    assert cgroups.attached == {closed}
    assert node.slurmd_folder() == closed


def test_a_closed_slurmd_is_opened_when_isolation_is_given_up_and_closed_again(
    node: Node, cgroups: Cgroups
) -> None:
    """A task of a job would start in slurmd's cgroup, and open no GPU, its own neither."""
    sessions.close_launcher(node.node(), SLURMD)
    closed = cgroups.attached.copy()

    node.settings["ISOLATION"] = "off"
    job.remove_ended_cgroups(node.node())
    assert cgroups.attached == set()

    node.settings["ISOLATION"] = "cgroup"
    sessions.close_launcher(node.node(), SLURMD)
    assert cgroups.attached == closed
