# SPDX-License-Identifier: Apache-2.0
"""A node for the tests of `install systemd`: simulated driver, a systemctl that keeps states."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.items import Item, Outcome, Wanted, run_items
from gpulock.install.systemd import install
from gpulock.install.systemd.install import SystemdInstaller
from gpulock.install.systemd.units import UNITS, read_static_files
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import ignore

STATES = ("read", "enabled", "active", "failed")

# the states that a verb ends
STOPS = {"disable": STATES[1:3], "stop": STATES[2:3], "reset-failed": STATES[3:]}


class FakeSystemctl:
    """systemctl of a systemd that keeps in files what it knows, for a child that is killed, too.

    A unit is in a folder for each of its states, with the text that it had at that moment.
    """

    def __init__(self, known: Path) -> None:
        self.known, self.fails = known, ""
        self.dies = False  # what is started ends at once
        self.properties: dict[str, dict[str, str]] = {}
        self.told: list[str] = []
        for state in STATES:
            (known / state).mkdir(parents=True)

    def text(self, unit: str) -> str:
        """Return what there is of a unit and its drop-in now, nothing without a unit."""
        places = (install.unit_path(unit), install.ROOT / "usr/lib/systemd/system" / unit)
        text = next((text for path in places if (text := read(path))), "")
        return text and text + read(install.drop_in_path(unit))

    def kept(self, unit: str) -> str:
        """Return what systemd goes by for a unit: what it read, else what it finds."""
        return read(self.known / "read" / unit) or self.text(unit)

    def units(self, state: str) -> set[str]:
        """Return the units that are in a state."""
        return {path.name for path in (self.known / state).iterdir()}

    def mark(self, state: str, unit: str, text: str) -> None:
        """Have a unit be in a state, with a text; without one it is in it no more."""
        path = self.known / state / unit
        if text:
            path.write_text(text)
        else:
            path.unlink(missing_ok=True)

    def __call__(self, program: str, verb: str, *words: str) -> str:
        """Do as systemctl does, as far as the installer relies on it; as other programs nothing."""
        if program != "systemctl":
            self.told.append(" ".join((program, verb, *words)))
            return ""
        units = [word for word in words if not word.startswith("-")]
        if verb == "show":
            return self.show(units[0])
        self.told.append(" ".join((verb, *units)))
        if self.fails == verb:
            raise InstallError(f"systemctl {verb} ended with 1: it does not")
        for unit in units or UNITS:
            if units and not self.kept(unit):
                raise InstallError(f"Unit {unit} not found.")
            if verb == "daemon-reload":
                self.mark("read", unit, self.text(unit))
            elif verb == "enable":
                self.mark("enabled", unit, self.kept(unit))
            elif verb == "restart" and not self.dies:
                self.mark("active", unit, self.kept(unit))
            for state in STOPS.get(verb, ()):
                self.mark(state, unit, "")
        return ""

    def show(self, unit: str) -> str:
        """Return the properties of a unit, one a line."""
        if not self.kept(unit):
            return "LoadState=not-found\nActiveState=inactive\n"
        active = "active" if unit in self.units("active") else "inactive"
        found = {
            "LoadState": "loaded",
            "UnitFileState": "enabled" if unit in self.units("enabled") else "disabled",
            "ActiveState": "failed" if unit in self.units("failed") else active,
            **self.properties.get(unit, {}),
        }
        return "".join(f"{name}={value}\n" for name, value in found.items())


def read(path: Path) -> str:
    """Return a text, nothing for one that is not there."""
    return path.read_text() if path.exists() else ""


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

    def give_package_units(self) -> None:
        """Put the units of a distribution's package there, for these settings."""
        folder = self.root / "usr/lib/systemd/system"
        folder.mkdir(parents=True)
        for name in UNITS:
            text = read_static_files()[name]
            (folder / name).write_text(text.replace("/etc/gpulock/gpulock.conf", str(self.config)))

    def drop_in(self, unit: str) -> str:
        """Return the drop-in of an installed unit."""
        return install.drop_in_path(unit).read_text()

    def set(self, **keys: str) -> None:
        """Add lines to the settings."""
        with self.config.open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in keys.items())

    def parts(self) -> list[Item]:
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
        items: list[Item],
        wanted: Wanted,
        said: list[str] | None = None,
        dry_run: bool = False,
    ) -> Outcome:
        """Bring all items where they are wanted."""
        echo = ignore if said is None else said.append
        return run_items(items, wanted, self.root / "state/install", echo, dry_run)


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
    patch.setattr(install, "BOOTED", folder)
    patch.setattr(install, "_HIDDEN", ())
    patch.setattr(install, "ROOT", folder)
    ctl = FakeSystemctl(folder / "systemd")
    patch.setattr(install, "run_systemd_program", ctl)
    return SystemdNode(folder, config, ctl)
