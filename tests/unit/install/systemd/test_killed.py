# SPDX-License-Identifier: Apache-2.0
"""A killed `install systemd` leaves nothing that another run does not complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.items import Wanted
from gpulock.install.systemd import install, manager
from gpulock.install.systemd.install import SystemdInstaller
from gpulock.install.systemd.units import DAEMON, UNITS
from tests.support.killed import ALL_OR_SAMPLE, KilledSite
from tests.support.systemd_site import SystemdNode, make_systemd_node

pytestmark = pytest.mark.slow
FUTURE = 1e10


class KilledSystemd(KilledSite):
    """A node whose systemd keeps in files what it does: of a package's units it runs gpulockd's."""

    def __init__(self, node: SystemdNode, patch: pytest.MonkeyPatch) -> None:
        self.node, self.options = node, replace(node.options, ctl=self.systemctl)
        self.known = node.root / "systemd"
        patch.setattr(manager, "run_systemd_program", self._make)
        patch.setattr(install, "process_start_time", self._started)
        for name in ("read", "enabled", "active"):
            (self.known / name).mkdir(parents=True)
        self.package = node.root / "usr/lib/systemd/system"
        self.package.mkdir(parents=True)
        for name in UNITS:
            (self.package / name).write_text("[Unit]\n")
        for state in ("read", "enabled", "active"):
            (self.known / state / DAEMON).write_text("[Unit]\n")
        (self.known / "list").touch()
        super().__init__(node.root)

    def _make(self, *command: str) -> str:
        """Be the program that makes users."""
        with self.one_call(command[0]):
            (self.known / "made").touch()
        return ""

    def _look(self, unit: str) -> str:
        """Return the text of a unit that systemd finds, nothing for one that is not there."""
        places = (self.options.unit_path(unit), self.package / unit)
        text = next((text for one in places if (text := read(one))), "")
        return text and text + read(self.options.drop_in_path(unit))

    def _started(self, pid: int) -> float:
        """Return when a service was started: before its unit's text of now, or long after."""
        unit = UNITS[pid - 1]
        return 0.0 if read(self.known / "active" / unit) != self._look(unit) else FUTURE

    def _show(self, unit: str) -> str:
        text = read(self.known / "read" / unit) or self._look(unit)
        if not text:
            return "LoadState=not-found\nActiveState=inactive\n"
        states = {
            "LoadState": "loaded",
            "UnitFileState": "enabled" if read(self.known / "enabled" / unit) else "disabled",
            "ActiveState": "active" if read(self.known / "active" / unit) else "inactive",
            "MainPID": str(UNITS.index(unit) + 1),
            "NeedDaemonReload": "no" if text == self._look(unit) else "yes",
        }
        return "".join(f"{name}={value}\n" for name, value in states.items())

    def systemctl(self, verb: str, *words: str) -> str:
        """Be a systemctl whose systemd knows of a unit what it read last."""
        units = [word for word in words if not word.startswith("-")]
        if verb == "show":
            return self._show(units[0])
        with self.one_call(verb):
            for unit in units or UNITS:
                enabled, active = (self.known / state / unit for state in ("enabled", "active"))
                text = read(self.known / "read" / unit)
                if units and not text:
                    raise InstallError(f"Unit {unit} not found.")
                if verb == "daemon-reload":
                    (self.known / "read" / unit).write_text(self._look(unit))
                elif verb == "enable":
                    enabled.write_text(text)
                elif verb == "restart":
                    active.write_text(text)
                    if unit == DAEMON:
                        (self.known / "list").touch()
                elif verb == "disable":
                    enabled.unlink(missing_ok=True)
                    active.unlink(missing_ok=True)
        return ""

    def apply(self) -> None:
        self.node.run(SystemdInstaller(self.options).parts(), Wanted.PRESENT)

    def undo(self) -> list[str]:
        parts = SystemdInstaller(self.options).removal()
        return self.node.run(parts, Wanted.ABSENT).clauses()


def read(path: Path) -> str:
    """Return a text, nothing for one that is not there."""
    return path.read_text() if path.exists() else ""


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KilledSystemd:
    return KilledSystemd(make_systemd_node(tmp_path / "node", monkeypatch), monkeypatch)


@ALL_OR_SAMPLE
def test_an_installation_killed_anywhere_is_taken_back_or_completed(
    played: KilledSystemd, share: int
) -> None:
    assert played.killed_installations(share) == []


@ALL_OR_SAMPLE
def test_an_uninstallation_killed_anywhere_is_completed_by_another(
    played: KilledSystemd, share: int
) -> None:
    assert played.killed_uninstallations(share) == []
