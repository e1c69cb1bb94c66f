# SPDX-License-Identifier: Apache-2.0
"""What `gpulock doctor` says of containers on a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.reconcile import cdi
from gpulock.install.doctor.check import FAULT, OK, WARNING, Finding, run_checks
from gpulock.install.doctor.containers import container_checks
from gpulock.install.doctor.doctor import run_doctor
from gpulock.node.context import Node as Seen
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node

VERSION = "570.172.08"
BANNER = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {VERSION}  Release Build\n"


class Node:
    """A node that is not simulated, whose files are all below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = write_simulated_node(root / "node", "workstation")
        keys = read_settings(str(self.files.config)).__dict__
        names = ("driver_root", "sys_root", "dev_root", "lock_dir", "state_dir")
        self.keys = {name.upper(): str(keys[name]) for name in names}
        (Path(self.keys["DRIVER_ROOT"]) / "version").write_text(BANNER)
        self.set = root / "sets" / VERSION

    def with_set(self) -> None:
        """Put a whole driver set where every user can read it."""
        for part in ("bin", "lib"):
            (self.set / part).mkdir(parents=True)
        (self.set / f"lib/libcuda.so.{VERSION}").touch()
        (self.set / "lib/libcuda.so.1").symlink_to(f"libcuda.so.{VERSION}")
        (self.set / "bin/nvidia-smi").touch()
        for path in (self.set.parent, *self.set.parent.rglob("*")):
            path.chmod(0o755)
        self.keys["DRIVER_DIR"] = str(self.root / "sets")

    def write(self, name: str, text: str) -> Path:
        """Write a file below the node's root."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def checks(self) -> list[Finding]:
        """Return what doctor finds, OK for what it does not."""
        report = run_checks(container_checks(Settings(dict(self.keys)), self.root))
        return [*report.findings, *(Finding(name, OK, "") for name in report.passed)]

    def of(self, name: str) -> Finding:
        """Return the only check of a name."""
        (found,) = [check for check in self.checks() if check.name == name]
        return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_driver_set_is_whole_for_the_driver_that_is_loaded(node: Node) -> None:
    node.with_set()
    assert node.of("driver set").state == OK

    node.set.rename(node.set.with_name("535.5.1"))
    check = node.of("driver set")
    assert check.state == FAULT and "put the driver's files" in check.do
    assert "no driver set for this node's driver 570.172.08" in check.what

    node.keys["DRIVER_DIR"] += ",/evil"
    check = node.of("driver set")
    assert check.state == FAULT and "cannot be bound" in check.what and "plain path" in check.do


def test_a_spec_that_is_not_there_or_of_another_day_is_to_be_written(node: Node) -> None:
    node.keys["CDI_DIR"] = str(node.root / "run/cdi")
    assert (node.of("CDI").state, "is missing" in node.of("CDI").what) == (WARNING, True)
    settings = Settings(dict(node.keys))
    cdi.update_cdi_spec(settings, cdi.format_cdi_spec(settings, Seen(settings).devices()))
    assert node.of("CDI").state == OK
    (Path(node.keys["DEV_ROOT"]) / "nvidia-uvm").unlink()

    check = node.of("CDI")
    assert (check.state, "is not as the node is" in check.what) == (WARNING, True)
    assert "gpulock cdi --write" in check.do


def test_without_its_driver_set_nothing_is_said_of_a_spec(node: Node) -> None:
    node.keys |= {"CDI_DIR": str(node.root / "run/cdi"), "DRIVER_DIR": str(node.root)}
    assert "CDI" not in {one.name for one in node.checks()}


def test_enroot_without_the_hook_has_no_mask(node: Node) -> None:
    node.write("etc/enroot/hooks.d/98-nvidia.sh", "")
    assert "no mask of the job" in node.of("enroot").what
    node.write("etc/enroot/hooks.d/97-gpulock.sh", "")
    assert node.of("containers").state == OK


def test_podman_without_the_hook_is_told_where_nvidias_gives_every_gpu(node: Node) -> None:
    node.write("usr/bin/podman", "")
    assert node.of("containers").state == OK
    node.write("etc/cdi/nvidia.yaml", "")
    check = node.of("podman")
    assert (check.state, "every GPU" in check.what) == (WARNING, True)
    assert "--podman" in check.do
    node.write("usr/share/containers/oci/hooks.d/97-gpulock.json", "")
    assert node.of("containers").state == OK


def test_doctor_says_it_of_a_simulated_node_too_but_looks_nowhere_else(tmp_path: Path) -> None:
    files = write_simulated_node(tmp_path / "node", "dgx1")
    config = Path(files.config)
    config.write_text(config.read_text() + f"DRIVER_DIR={tmp_path}/sets\n")

    report = run_doctor(config)
    assert ("driver set" in report.failed, report.silent["CDI"]) == (True, "driver set")
    assert "containers" not in {*report.passed, *report.failed}
