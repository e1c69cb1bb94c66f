# SPDX-License-Identifier: Apache-2.0
"""What doctor says of isolation and of containers, and whether what is set holds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpulock.install.doctor import isolation as doctor_isolation
from gpulock.install.doctor.check import FAULT, OK, WARNING, Finding, Report, run_checks
from gpulock.install.doctor.containers import container_checks
from gpulock.install.doctor.doctor import run_doctor
from gpulock.install.slurm.slurm_conf import parse_scontrol_config
from gpulock.install.slurm.wanted import wanted_setting_lines
from gpulock.isolation import bpf
from gpulock.node.settings import Settings
from gpulock.simulate.node import write_simulated_node
from tests.support.faults import raising
from tests.support.trees import Box

LINE = "session required pam_exec.so quiet /opt/gpulock/current/prolog/slurm-session\n"
OPTIONAL = LINE.replace("required", "optional")


class Cell(Box):
    """A Box with cgroups, and a driver that leaves its nodes alone."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.cgroup = root / "sys/fs/cgroup"
        self.pam = root / "pam.d-slurm"
        for name in ("unified/cgroup.procs", "unified/cgroup.controllers"):
            (self.cgroup / name).parent.mkdir(parents=True, exist_ok=True)
            (self.cgroup / name).touch()

    def login(self, place: str, closed: bool = True) -> None:
        """Let users log in below a cgroup to which a program of ours is attached, or is not."""
        (self.cgroup / "unified" / place).mkdir(parents=True)
        if closed:
            (self.cgroup / "unified" / place / "gpulock_dev").touch()

    def run(self, isolation: str, slurm: bool = False) -> Report:
        """Return what doctor says."""
        self.settings["ISOLATION"] = isolation
        return run_checks(doctor_isolation.isolation_checks(self.node().settings, slurm, self.pam))

    def worst(self, isolation: str, slurm: bool = False) -> Finding:
        """Return the worst that doctor says."""
        found = [Finding("", OK, ""), *self.run(isolation, slurm).findings]
        return max(found, key=lambda one: (OK, WARNING, FAULT).index(one.state))


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cell:
    monkeypatch.setattr(bpf, "load_device_program", lambda _: os.open("/dev/null", os.O_RDONLY))
    monkeypatch.setattr(bpf, "has_device_program", lambda at: Path(at, "gpulock_dev").exists())
    made = Cell(tmp_path)
    made.login("user.slice")
    return made


@pytest.mark.parametrize(
    ("text", "state"),
    [*((one, FAULT) for one in (None, "", f"#{LINE}", OPTIONAL)), (LINE, OK)],
)
def test_a_stack_of_pam_that_starts_no_session_of_ours_is_a_fault(
    cell: Cell, text: str | None, state: str
) -> None:
    if text is not None:
        cell.pam.write_text(text)

    assert cell.worst("cgroup", slurm=True).state == state
    assert cell.run("cgroup", slurm=True).facts == ["ISOLATION=cgroup"]


@pytest.mark.parametrize("way", ["", "@include login\n", "session include login\n"])
def test_a_stack_that_takes_variables_of_users_is_a_fault(cell: Cell, way: str) -> None:
    """Tried on a real Slurm: LD_PRELOAD in ~/.pam_environment was loaded as root by our session."""
    taken = "auth required pam_env.so user_readenv=1\n"
    cell.pam.with_name("login").write_text(taken)
    cell.pam.write_text(f"{way or taken}{LINE}")

    worst = cell.worst("cgroup", slurm=True)
    assert worst.state == FAULT and "user_readenv=1" in worst.do

    cell.pam.with_name("login").write_text(f"#{taken}")
    cell.pam.write_text(f"{way}{LINE}")
    assert cell.worst("cgroup", slurm=True).state == OK


def test_a_kernel_that_takes_no_program_is_a_fault_where_it_is_to_isolate(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = raising(PermissionError(1, "Operation not permitted"))
    monkeypatch.setattr(bpf, "load_device_program", denied)
    worst = cell.worst("cgroup")
    assert worst.state == FAULT and "Operation not permitted" in worst.what

    shutil.rmtree(cell.cgroup)
    assert cell.run("off").facts == ["ISOLATION=off"]
    assert cell.worst("cgroup").state == FAULT, "nobody can isolate without cgroups"


def test_a_login_service_without_a_program_of_ours_is_not_said_to_be_closed(cell: Cell) -> None:
    cell.login("system.slice/cron.service")
    assert "isolation: logins" in cell.run("cgroup").passed

    cell.login("system.slice/ssh.service", closed=False)

    worst = cell.worst("cgroup")
    assert worst.state == FAULT
    assert "closes ssh.service:" in worst.what and "gpulock reap" in worst.do
    for name in ("user.slice", "system.slice"):
        shutil.rmtree(cell.cgroup / "unified" / name)
    assert "no cgroup of logins" in cell.worst("cgroup").what


@pytest.mark.parametrize(
    ("isolation", "shown", "asked"),
    [("cgroup", "No", True), ("cgroup", "Yes", False), ("off", "No", False), ("cgroup", "", True)],
)
def test_the_installer_asks_for_sessions_where_steps_are_confined_by_them(
    isolation: str, shown: str, asked: bool
) -> None:
    line = f"UsePAM                  = {shown}\n" if shown else ""
    conf = parse_scontrol_config(f"{line}SLURM_VERSION           = 22.05.8\n")

    keys = [want.key for want in wanted_setting_lines(conf, Settings({"ISOLATION": isolation}))]

    assert ("UsePAM" in keys) is asked


# --- containers -----------------------------------------------------------------------------------

VERSION = "570.172.08"
ENROOT = "etc/enroot/hooks.d/97-gpulock.sh"
PODMAN = "usr/share/containers/oci/hooks.d/97-gpulock.json"
BANNER = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {VERSION}  Release Build\n"


class Node(Box):
    """A node that is not simulated, with a driver's version, and a driver set for it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "node")
        self.top, self.set = root, root / "sets" / VERSION
        (self.driver / "version").write_text(BANNER)
        for part in ("bin", "lib"):
            (self.set / part).mkdir(parents=True)
        (self.set / f"lib/libcuda.so.{VERSION}").touch()
        (self.set / "lib/libcuda.so.1").symlink_to(f"libcuda.so.{VERSION}")
        (self.set / "bin/nvidia-smi").touch()
        for path in (self.set.parent, *self.set.parent.rglob("*")):
            path.chmod(0o755)
        self.settings["DRIVER_DIR"] = str(self.top / "sets")

    def write(self, name: str) -> None:
        """Write a file of the machine."""
        path = self.top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def findings(self) -> list[Finding]:
        """Return what doctor finds."""
        return run_checks(container_checks(self.node().settings, self.top)).findings


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_driver_set_is_whole_for_the_driver_that_is_loaded(node: Node) -> None:
    assert node.findings() == []

    node.set.rename(node.set.with_name("535.5.1"))
    (check,) = node.findings()
    assert check.state == FAULT and "put the driver's files" in check.do
    assert "no driver set for this node's driver 570.172.08" in check.what

    node.settings["DRIVER_DIR"] += ",/evil"
    (check,) = node.findings()
    assert check.state == FAULT and "cannot be bound" in check.what and "plain path" in check.do


@pytest.mark.parametrize(
    ("there", "name", "says", "hook"),
    [
        (("etc/enroot/hooks.d/98-nvidia.sh",), "enroot", "no mask of the job", ENROOT),
        (("usr/bin/podman", "etc/cdi/nvidia.yaml"), "podman", "every GPU", PODMAN),
    ],
)
def test_containers_of_a_job_without_the_hook_have_no_mask(
    node: Node, there: tuple[str, ...], name: str, says: str, hook: str
) -> None:
    for path in (*there, "usr/lib/gpulock/hooks/current/x"):
        assert node.findings() == []
        node.write(path)
    (check,) = node.findings()
    assert (check.name, check.state, says in check.what) == (name, WARNING, True)
    link = f"ln -sf /usr/lib/gpulock/hooks/current/{name}/{Path(hook).name} /{hook}"
    assert check.do.endswith(link), "it replaces one that leads nowhere"
    node.write(hook)
    assert node.findings() == []


def test_doctor_says_it_of_a_simulated_node_too_but_looks_nowhere_else(tmp_path: Path) -> None:
    files = write_simulated_node(tmp_path / "node", "dgx1")
    config = Path(files.config)
    config.write_text(config.read_text() + f"DRIVER_DIR={tmp_path}/sets\n")

    report = run_doctor(config)
    assert "driver set" in report.failed
    assert "containers" not in {*report.passed, *report.failed}
