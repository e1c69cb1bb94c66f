# SPDX-License-Identifier: Apache-2.0
"""A command that doctor prints mends the node when it is pasted, also where paths have blanks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.install.doctor.check import FAULT, Finding, run_checks
from gpulock.install.doctor.node import node_checks
from gpulock.node.settings_file import read_settings
from tests.support.cli_site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "GPUs of us")


def faults(site: Site) -> list[Finding]:
    report = run_checks(node_checks(read_settings(site.config)))
    return [one for one in report.findings if one.state == FAULT]


def open_gate(site: Site) -> None:
    Path(f"{site.files.lock_dir}.claims/gate").chmod(0o644)


def file_for_a_lock(site: Site) -> None:
    (site.files.lock_dir / "locks" / site.id(2)).touch()


def folder_for_the_boot_id(site: Site) -> None:
    path = Path(f"{site.files.lock_dir}.claims/boot_id")
    path.unlink()
    path.mkdir()


def open_state_dir(site: Site) -> None:
    Path(read_settings(site.config).state_dir).chmod(0o775)


def lost_quarantine(site: Site) -> None:
    (Path(read_settings(site.config).state_dir) / "quarantine.lost").touch()


@pytest.mark.parametrize("name", ["", ".claims"])
def test_what_is_wrong_with_either_folder_is_named(site: Site, name: str) -> None:
    site.hold(1)
    folder = Path(f"{site.files.lock_dir}{name}")
    folder.chmod(0o777)
    (broken,) = faults(site)
    assert f"LOCK_DIR {folder} has uid" in broken.what and "mode 777" in broken.what


@pytest.mark.parametrize(
    "plant", [open_gate, file_for_a_lock, folder_for_the_boot_id, open_state_dir, lost_quarantine]
)
def test_the_command_for_a_fault_of_the_node_mends_it(
    site: Site, plant: Callable[[Site], None]
) -> None:
    site.hold(1)
    assert faults(site) == []
    plant(site)
    (broken,) = faults(site)
    command = broken.do.rpartition("then: ")[2]
    site.shell(command.replace("gpulock reap", '"$@" reap'))
    assert faults(site) == []
