# SPDX-License-Identifier: Apache-2.0
"""A node for the tests of `install systemd`: simulated driver, a systemctl that keeps states."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.items import InstallParts, Outcome, Wanted, run_items
from gpulock.install.systemd import install, manager
from gpulock.install.systemd.install import SystemdInstaller
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import ignore


@dataclass
class FakeSystemctl:
    """What systemctl says of units whose files are in `folder`, and what it was told."""

    folder: Path
    enabled: set[str] = field(default_factory=set[str])
    active: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    properties: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    told: list[str] = field(default_factory=list[str])
    fails: str = ""
    dies: bool = False  # what is started ends at once
    reads_again: bool = False  # a daemon-reload ends NeedDaemonReload

    def __call__(self, *words: str) -> str:
        """Do as systemctl does, as far as the installer relies on it."""
        verb, *rest = words
        units = [word for word in rest if not word.startswith("-")]
        if verb == "show":
            return self.show(units[0])
        self.told.append(" ".join((verb, *units)))
        if self.fails == verb:
            raise InstallError(f"systemctl {verb} ended with 1: it does not")
        if verb == "daemon-reload" and self.reads_again:
            for found in self.properties.values():
                found.pop("NeedDaemonReload", None)
        elif verb == "enable":
            self.enabled |= {*units}
        elif verb == "restart" and not self.dies:
            self.active |= {*units}
        elif verb == "reset-failed":
            self.failed -= {*units}
        elif verb == "disable":
            self.enabled -= {*units}
            self.active -= {*units}
        return ""

    def show(self, unit: str) -> str:
        """Return the properties of a unit, one a line."""
        if not (self.folder / unit).exists():
            kept = self.properties.get(unit, {}).get("NeedDaemonReload", "no")
            return f"LoadState=not-found\nActiveState=inactive\nNeedDaemonReload={kept}\n"
        found = {
            "LoadState": "loaded",
            "UnitFileState": "enabled" if unit in self.enabled else "disabled",
            "ActiveState": (
                "failed" if unit in self.failed else "active" if unit in self.active else "inactive"
            ),
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

    def drop_in(self, unit: str) -> str:
        """Return the drop-in of an installed unit."""
        return install.drop_in_path(unit).read_text()

    def set(self, **keys: str) -> None:
        """Add lines to the settings."""
        with self.config.open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in keys.items())

    def parts(self) -> InstallParts:
        """Return the items of an installation."""
        return SystemdInstaller(self.config).parts()

    def differences(self) -> dict[str, list[str]]:
        """Return what an installation would change, by title."""
        said: list[str] = []
        outcome = self.run(self.parts(), Wanted.PRESENT, said, dry_run=True)
        starts = [*(said.index(title) for title in outcome.changed), len(said)]
        return {said[at]: said[at + 1 : end] for at, end in zip(starts, starts[1:])}

    def install(self) -> Outcome:
        """Install."""
        return self.run(self.parts(), Wanted.PRESENT)

    def uninstall(self) -> Outcome:
        """Uninstall."""
        return self.run(SystemdInstaller(self.config).removal(), Wanted.ABSENT)

    def run(
        self,
        parts: InstallParts,
        wanted: Wanted,
        said: list[str] | None = None,
        dry_run: bool = False,
    ) -> Outcome:
        """Bring all items where they are wanted."""
        echo = ignore if said is None else said.append
        return run_items(parts.items, wanted, self.root / "state/install", echo, dry_run)


def nothing(*_: str) -> str:
    """Do nothing, in place of a self-test."""
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
    patch.setattr(manager, "run_systemd_program", nothing)
    patch.setattr(install, "check_exporter_python", nothing)
    patch.setattr(install, "ROOT", folder)
    ctl = FakeSystemctl(folder / "usr/local/lib/systemd/system")
    patch.setattr(manager, "systemctl", ctl)
    return SystemdNode(folder, config, ctl)
