# SPDX-License-Identifier: Apache-2.0
"""The ways round a job's cgroup are closed, whatever services come and go meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpulock.isolation import bpf, sessions
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.isolation.tree import V2, CgroupHierarchy

USERS, SSH, CRON = "user.slice", "system.slice/ssh.service", "system.slice/cron.service"


class Cgroups:
    """Cgroups of version 2 that remember whether a program of ours is attached."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.attached: set[str] = set()
        self.faults: dict[str, list[int]] = {}
        self.vanishing: set[str] = set()
        for place in (USERS, SSH, CRON):
            (top / place).mkdir(parents=True)

    @property
    def trees(self) -> list[CgroupHierarchy]:
        return [CgroupHierarchy(V2, str(self.top))]

    def closed(self) -> set[str]:
        """Return the places that are closed."""
        return {os.path.relpath(folder, self.top) for folder in self.attached}

    def look(self, folder: str) -> bool:
        """Stand for bpf.is_attached."""
        self._fail(folder)
        return folder in self.attached

    def attach(self, folder: str, _: bytes) -> None:
        """Stand for bpf.attach."""
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


def test_all_that_are_there_are_closed_and_opened_again(cgroups: Cgroups) -> None:
    assert len(sessions.unclosed_login_cgroups(cgroups.trees)) == 3

    sessions.close_login_cgroups(cgroups.trees, CLOSE_ALL_GPUS)
    assert cgroups.closed() == {USERS, SSH, CRON}
    assert sessions.unclosed_login_cgroups(cgroups.trees) == []

    sessions.reopen_login_cgroups(cgroups.trees)
    assert cgroups.closed() == set()


def test_a_service_that_stops_at_this_moment_is_nothing_to_close(cgroups: Cgroups) -> None:
    cgroups.vanishing.add(SSH)

    sessions.close_login_cgroups(cgroups.trees, CLOSE_ALL_GPUS)

    assert cgroups.closed() == {USERS, CRON}


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV])
def test_a_service_that_is_back_in_a_new_cgroup_is_closed(cgroups: Cgroups, number: int) -> None:
    cgroups.faults[SSH] = [number, number]

    sessions.close_login_cgroups(cgroups.trees, CLOSE_ALL_GPUS)

    assert cgroups.closed() == {USERS, SSH, CRON}


def test_a_cgroup_that_is_there_and_says_it_is_not_is_told(cgroups: Cgroups) -> None:
    cgroups.faults[USERS] = [errno.ENOENT] * 100

    with pytest.raises(FileNotFoundError):
        sessions.close_login_cgroups(cgroups.trees, CLOSE_ALL_GPUS)


def test_one_that_cannot_be_closed_keeps_no_other_open(cgroups: Cgroups) -> None:
    cgroups.faults[USERS] = [errno.EPERM]

    with pytest.raises(PermissionError):
        sessions.close_login_cgroups(cgroups.trees, CLOSE_ALL_GPUS)

    assert cgroups.closed() == {SSH, CRON}


def test_one_that_goes_while_they_are_opened_again_is_no_fault(cgroups: Cgroups) -> None:
    sessions.close_login_cgroups(cgroups.trees, CLOSE_ALL_GPUS)
    cgroups.vanishing.add(SSH)

    sessions.reopen_login_cgroups(cgroups.trees)

    assert cgroups.closed() == {SSH}  # which is gone, with its program
