# SPDX-License-Identifier: Apache-2.0
"""What this machine's kernel does with our cgroups, beside others' programs."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpulock.isolation import bpf, job, sessions, tree
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.node.devices import MAJOR
from tests.labs.common.device_nodes import PROBE, TOP, make_nodes, opened, programs

pytestmark = pytest.mark.lab
NOBODY = 65534
COUNT = 4
ALL = {f"nvidia{n}" for n in range(COUNT)}
PYTHON = "/usr/bin/python3"  # one that every user may start
CAPS = 240  # nvidia-caps has what the kernel gave it: one of those for experiments
RULES = {MAJOR: frozenset({1, 254, 255})}
ONE_CARD = {"ENXIO": {"nvidia1", "nvidiactl"}, "EPERM": ALL - {"nvidia1"}}


@pytest.fixture
def dev() -> Iterator[Path]:
    """Make device nodes that every user reaches: not below pytest's folder, which each run closes.

    In /tmp, since a file system in memory may be mounted without device nodes.
    """
    with tempfile.TemporaryDirectory(prefix="gpulock-dev-", dir="/tmp") as made:
        os.chmod(made, 0o755)
        folder = Path(made) / "dev"
        make_nodes(folder, COUNT)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def group() -> Iterator[str]:
    """Give a cgroup that is gone after the test, with its programs."""
    before = programs()
    folder = f"{TOP}/gpulock-kernel-test"
    os.mkdir(folder)
    yield folder
    os.rmdir(folder)
    assert programs() == before


def inside(
    folders: Sequence[str], dev: Path, *around: str, uid: int = NOBODY
) -> dict[str, set[str]]:
    """Return what a process in cgroups may open, by error."""

    def enter() -> None:
        for folder in folders:
            tree.move_to_cgroup(os.getpid(), folder)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)

    done = subprocess.run(
        [*around, PYTHON, "-IS", "-c", PROBE, str(dev)],
        preexec_fn=enter,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return opened(done.stdout)


@pytest.mark.parametrize("uid", [0, NOBODY])
def test_every_other_card_is_closed(group: str, dev: Path, uid: int) -> None:
    job.close_job_cgroup(group, CLOSE_ALL_GPUS)
    job.close_job_cgroup(group, RULES)  # closed again it opens what the new rules say

    assert inside([group], dev, uid=uid) == ONE_CARD
    assert inside([group], dev, "/usr/bin/unshare", "-Urm", uid=NOBODY) == ONE_CARD
    assert inside([], dev) == {"ENXIO": ALL | {"nvidiactl"}}
    script = (
        f"mknod {dev}/x c {MAJOR} 0; echo $$ > {TOP}/cgroup.procs; mkdir {group}/x;"
        f" {PYTHON} -IS -c '{PROBE}' {dev}"
    )
    assert inside([group], dev, "/bin/sh", "-c", script) == ONE_CARD, "it can make nodes, or leave"
    assert not (dev / "x").exists()


def test_an_instance_has_its_own_access_nodes_and_no_other(group: str, dev: Path) -> None:
    access = dev / "nvidia-caps"
    access.mkdir()
    for minor in range(1, 7):
        os.mknod(access / f"nvidia-cap{minor}", 0o020666, os.makedev(CAPS, minor))
        (access / f"nvidia-cap{minor}").chmod(0o666)
    job.close_job_cgroup(group, {**RULES, CAPS: frozenset({3, 4})})

    own = {"nvidia-cap3", "nvidia-cap4"}
    others = {f"nvidia-cap{minor}" for minor in (1, 2, 5, 6)}
    assert inside([group], access) == {"ENXIO": own, "EPERM": others}
    job.close_job_cgroup(group, {**RULES, CAPS: frozenset[int]()})
    assert inside([group], access) == {"EPERM": own | others}


def test_a_program_of_somebody_elses_stays_and_both_are_asked(group: str, dev: Path) -> None:
    other = attach_other(group, {MAJOR: frozenset({0, 1, 255})})
    bpf.attach_device_program(group, bpf.assemble_device_program(RULES))
    bpf.attach_device_program(group, bpf.assemble_device_program({MAJOR: frozenset({1, 2, 255})}))

    assert inside([group], dev) == ONE_CARD
    bpf.detach_device_programs(group)
    assert not bpf.has_device_program(group)
    assert inside([group], dev)["ENXIO"] == {"nvidia0", "nvidia1", "nvidiactl"}
    os.close(other)


def test_hooks_that_close_one_cgroup_at_the_same_time_all_succeed(group: str, dev: Path) -> None:
    """The first jobs of a slurmd start together, and close slurmd's cgroup each."""
    before = programs()
    faults: list[OSError] = []

    def close_it() -> None:
        try:
            for _ in range(200):
                bpf.attach_device_program(group, bpf.assemble_device_program(RULES))
        except OSError as fault:
            faults.append(fault)

    hooks = [threading.Thread(target=close_it) for _ in range(4)]
    for hook in hooks:
        hook.start()
    for hook in hooks:
        hook.join()

    assert faults == []
    assert inside([group], dev) == ONE_CARD
    bpf.detach_device_programs(group)
    assert not bpf.has_device_program(group)
    assert programs() == before


def attach_other(folder: str, rules: dict[int, frozenset[int]]) -> int:
    """Attach a program that is not ours, as systemd does for DevicePolicy=."""
    name, bpf.PROGRAM_NAME = bpf.PROGRAM_NAME, b"sd_devices"
    try:
        bpf.attach_device_program(folder, bpf.assemble_device_program(rules))
    finally:
        bpf.PROGRAM_NAME = name
    return os.open(folder, os.O_RDONLY)


@pytest.mark.parametrize("place", sessions.LOGIN_CGROUPS)
def test_sessions_are_closed_to_users_and_open_to_root(dev: Path, place: str) -> None:
    before = programs()
    folder = f"{TOP}/{place}"
    made = [path for path in (os.path.dirname(folder), folder) if not os.path.isdir(path)]
    for path in made:
        os.mkdir(path)
    try:
        sessions.close_login_cgroups(TOP)
        closed_by = programs()
        sessions.close_login_cgroups(TOP)
        assert len(programs()) == len(closed_by) > len(before), "closed twice"
        closed = {"ENXIO": {"nvidiactl"}, "EPERM": ALL}
        assert inside([folder], dev) == closed
        assert inside([folder], dev, "/usr/bin/unshare", "-Ur") == closed
        assert inside([folder], dev, uid=0) == {"ENXIO": ALL | {"nvidiactl"}}
        sessions.reopen_cgroups(sessions.login_cgroups(TOP))
        assert inside([folder], dev) == {"ENXIO": ALL | {"nvidiactl"}}
    finally:
        for path in reversed(made):
            os.rmdir(path)
    assert programs() == before
