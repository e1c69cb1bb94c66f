# SPDX-License-Identifier: Apache-2.0
"""A killed installation leaves nothing that another run does not complete, or take back."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from gpulock.install.files import InstallError
from gpulock.install.items import FileItem, Item, Wanted, run_items
from gpulock.install.sge.qconf import Qconf
from gpulock.install.slurm import gres
from gpulock.install.slurm.site import SlurmSite
from gpulock.install.systemd import install, manager
from gpulock.install.systemd.units import DAEMON, UNITS
from tests.support.install_site import ignore, make_site
from tests.support.killed import ALL_OR_SAMPLE, KilledSite, Left
from tests.support.slurm_node import make_slurm_node
from tests.support.systemd_site import make_systemd_node

pytestmark = pytest.mark.slow
SLURM = 998  # who slurm.conf belongs to, where root may give it away
FUTURE = 1e10


class KilledItems(KilledSite):
    """A node with one file of the site's own."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        del patch
        root.mkdir()
        (root / "own").write_text("the site's\n")
        super().__init__(root)

    def items(self) -> list[Item]:
        return [FileItem(self.root / "etc/new/a", "a\n"), FileItem(self.root / "b", "b\n")]

    def apply(self) -> None:
        run_items(self.items(), Wanted.PRESENT, self.root / "state", ignore)

    def undo(self) -> list[str]:
        run_items(self.items(), Wanted.ABSENT, self.root / "state", ignore)
        return []


class KilledSge(KilledSite):
    """A host of a recorded Grid Engine."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.site = site = make_site(root, patch)
        site.install_cluster()
        run = Qconf.run

        def counted(qconf: Qconf, program: str, *args: str) -> str:
            """Be a client of Grid Engine, which does its work or does not."""
            shows = program != "qconf" or args[0].startswith("-s")
            with nullcontext() if shows else self.one_call(args[0]):
                return run(qconf, program, *args)

        patch.setattr(Qconf, "run", counted)
        (site.root / "profile.d").mkdir()
        super().__init__(site.root)

    def apply(self) -> None:
        self.site.install()

    def undo(self) -> list[str]:
        return self.site.uninstall().clauses()

    def left(self) -> Left:
        """Return all that there is; of what qconf shows each key with its value."""
        found = super().left()
        for hook in ("prolog", "epilog"):
            found.pop(f"sge/state/kept-{hook}", None)
            found[hook] = self.site.in_force(hook)
        for name in [name for name in found if name.startswith("sge/state/")]:
            del found[name]
            text = (self.root / name).read_text().replace("\\\n", "")
            rows = [one.split(None, 1) for one in text.splitlines() if one[:1] != "#"]
            found |= {f"{name} {row[0]}": "".join(row[-1].split()) for row in rows if row[1:]}
        return found


class KilledSlurm(KilledSite):
    """A node of a recorded Slurm, with the controller's slurm.conf and pyxis."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.node = node = make_slurm_node(root, patch)
        run_client = SlurmSite.run_client

        def counted(
            site: SlurmSite, command: list[str | Path], *how: Any
        ) -> subprocess.CompletedProcess[str]:
            """Be a program of Slurm's, which does its work or does not."""
            with self.one_call("reconfigure") if "reconfigure" in command else nullcontext():
                return run_client(site, command, *how)

        patch.setattr(SlurmSite, "run_client", counted)
        patch.setenv("SLURM_CONF", str(node.conf))
        # each try begins with files laid out anew, which are other versions
        patch.setattr(gres, "gres_conf_version", gres_conf_size)
        node.give_plugin()
        node.conf.chmod(0o664)
        if os.geteuid() == 0:
            os.chown(node.conf, SLURM, -1)
        super().__init__(node.root)

    def apply(self) -> None:
        self.node.install(write_conf=True)

    def undo(self) -> list[str]:
        return self.node.uninstall(write_conf=True).clauses()


class KilledSystemd(KilledSite):
    """A node whose systemd keeps in files what it does: of a package's units it runs gpulockd's."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.node = node = make_systemd_node(root, patch)
        patch.setattr(manager, "systemctl", self.systemctl)
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
        places = (install.unit_path(unit), self.package / unit)
        text = next((text for one in places if (text := read(one))), "")
        return text and text + read(install.drop_in_path(unit))

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
        self.node.install()

    def undo(self) -> list[str]:
        return self.node.uninstall().clauses()


def gres_conf_size(path: str) -> str:
    """Return what stands for the version of a gres.conf whose time each try changes."""
    return str(os.stat(path).st_size)


def read(path: Path) -> str:
    """Return a text, nothing for one that is not there."""
    return path.read_text() if path.exists() else ""


SITES = pytest.mark.parametrize("kind", [KilledItems, KilledSge, KilledSlurm, KilledSystemd])
Kind = Callable[[Path, pytest.MonkeyPatch], KilledSite]


def one_of(kind: Kind, share: int) -> int:
    """Return of how many calls one is tried: where there are few, each."""
    return 1 if kind is KilledItems else share


@SITES
@ALL_OR_SAMPLE
def test_an_installation_killed_anywhere_is_taken_back_or_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, share: int
) -> None:
    assert kind(tmp_path / "site", monkeypatch).killed_installations(one_of(kind, share)) == []


@SITES
@ALL_OR_SAMPLE
def test_an_uninstallation_killed_anywhere_is_completed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, share: int
) -> None:
    assert kind(tmp_path / "site", monkeypatch).killed_uninstallations(one_of(kind, share)) == []
