# SPDX-License-Identifier: Apache-2.0
"""A node for the tests of `install systemd`: simulated driver, a systemctl that keeps states."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpulock.install.hooks import InstallError
from gpulock.install.planner import InstallPlan
from gpulock.install.systemd import install, manager
from gpulock.install.systemd.install import SystemdOptions, plan_systemd
from gpulock.simulate.node import write_simulated_node


@dataclass
class FakeSystemctl:
    """What systemctl says of units whose files are in `folder`, and what it was told."""

    folder: Path
    enabled: set[str] = field(default_factory=set[str])
    active: set[str] = field(default_factory=set[str])
    properties: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    told: list[str] = field(default_factory=list[str])
    fails: str = ""
    dies: bool = False  # what is started ends at once

    def __call__(self, *words: str) -> str:
        """Do as systemctl does, as far as the installer relies on it."""
        verb, *rest = words
        units = [word for word in rest if not word.startswith("-")]
        if verb == "show":
            return self.show(units[0])
        self.told.append(" ".join((verb, *units)))
        if self.fails == verb:
            raise InstallError(f"systemctl {verb} ended with 1: it does not")
        if verb == "enable":
            self.enabled |= {*units}
        elif verb == "restart" and not self.dies:
            self.active |= {*units}
        elif verb == "disable":
            self.enabled -= {*units}
            self.active -= {*units}
        return ""

    def show(self, unit: str) -> str:
        """Return the properties of a unit, one a line."""
        if not (self.folder / unit).exists():
            return "LoadState=not-found\nActiveState=inactive\n"
        found = {
            "LoadState": "loaded",
            "UnitFileState": "enabled" if unit in self.enabled else "disabled",
            "ActiveState": "active" if unit in self.active else "inactive",
            "MainPID": "0",
            "NeedDaemonReload": "no",
            "FragmentPath": str(self.folder / unit),
            **self.properties.get(unit, {}),
        }
        return "".join(f"{name}={value}\n" for name, value in found.items())


@dataclass(frozen=True)
class SystemdNode:
    """Where everything is."""

    root: Path
    config: Path
    ctl: FakeSystemctl

    @property
    def etc(self) -> Path:
        """Where the files go."""
        return self.root / "etc"

    @property
    def options(self) -> SystemdOptions:
        """What an administrator asks for."""
        return SystemdOptions(self.config, sys.executable, self.etc, self.ctl)

    def unit(self, name: str) -> str:
        """Return the text of an installed unit."""
        return (self.etc / "systemd/system" / name).read_text()

    def set(self, **keys: str) -> None:
        """Add lines to the settings."""
        with self.config.open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in keys.items())

    def install(self) -> InstallPlan:
        """Install; return the plan that was followed."""
        plan = plan_systemd(self.options)
        plan.apply(lambda _: None)
        return plan


def nothing(*_: str) -> str:
    """Do nothing, in place of a self-test."""
    return ""


def run_systemd_program(*command: str) -> str:
    """Make the folders that a file for systemd-tmpfiles names below this node; do nothing else."""
    file = Path(command[-1])
    for line in file.read_text().splitlines() if command[0] == "systemd-tmpfiles" else ():
        words = line.split()
        if words[0] == "d" and Path(words[1]).is_relative_to(file.parents[2]):
            Path(words[1]).mkdir(parents=True, exist_ok=True)
    return ""


@functools.cache
def driver(top: Path) -> Path:
    """Return the tree of a driver with eight cards, made once and never changed."""
    return write_simulated_node(top / "dgx1", "dgx1").directory


def make_systemd_node(folder: Path, patch: pytest.MonkeyPatch) -> SystemdNode:
    """Lay the node out, as one whose systemd and whose exporter's user are there."""
    tree = driver(folder.parent)
    config = folder / "etc/gpulock/gpulock.conf"
    config.parent.mkdir(parents=True)
    keys = {
        "LOCK_DIR": folder / "run/gpulock",
        "STATE_DIR": folder / "state",
        "DRIVER_ROOT": tree / "proc/driver/nvidia",
        "SYS_ROOT": tree / "sys",
        "DEV_ROOT": tree / "dev",
    }
    config.write_text("".join(f"{name}={value}\n" for name, value in keys.items()))
    patch.setattr(manager, "RUNNING", folder)
    patch.setattr(manager, "run_systemd_program", run_systemd_program)
    patch.setattr(install, "check_exporter_python", nothing)
    patch.setattr(install, "exporter_user_exists", lambda: True)
    return SystemdNode(folder, config, FakeSystemctl(folder / "etc/systemd/system"))
