# SPDX-License-Identifier: Apache-2.0
"""A killed installation leaves nothing that another run does not complete, or take back."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from gpulock.install import versions
from gpulock.install.items import FileItem, Item, Wanted, run_items
from gpulock.install.sge.qconf import Qconf
from gpulock.install.slurm import gres
from gpulock.install.systemd import install
from gpulock.install.systemd.units import DAEMON
from gpulock.install.versions import SGE, Hooks
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import ignore, make_site
from tests.support.killed import ALL_OR_SAMPLE, KilledSite, Left, run_killed
from tests.support.slurm_node import make_slurm_node
from tests.support.systemd_site import make_systemd_node

pytestmark = pytest.mark.slow


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
    """A node of a recorded Slurm, whose slurm.conf is the cluster's."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.node = make_slurm_node(root, patch)
        # each try begins with files laid out anew, which are other versions
        patch.setattr(gres, "gres_conf_version", lambda path: str(os.stat(path).st_size))
        super().__init__(root)

    def apply(self) -> None:
        self.node.install()

    def undo(self) -> list[str]:
        return self.node.uninstall().clauses()


class KilledSystemd(KilledSite):
    """A node whose systemd runs gpulockd of a package's units."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.node = node = make_systemd_node(root, patch)
        node.give_package_units()
        patch.setattr(install, "run_systemd_program", self.program)
        for state in ("read", "enabled", "active"):
            node.ctl.mark(state, DAEMON, node.ctl.text(DAEMON))
        super().__init__(node.root)

    def program(self, name: str, *words: str) -> str:
        """Be systemctl, or the program that makes users, that does its work or does not."""
        with nullcontext() if words[0] == "show" else self.one_call(words[0]):
            if name != "systemctl":
                (self.node.ctl.known / "made").touch()
            return self.node.ctl(name, *words)

    def apply(self) -> None:
        self.node.install()

    def undo(self) -> list[str]:
        return self.node.uninstall().clauses()


class KilledRepair(KilledSite):
    """A node whose hooks in force are damaged."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setitem(versions._TRIALS, SGE, ignore)
        self.hooks = Hooks(read_settings(str(write_simulated_node(root, "dgx1").config)), SGE)
        self.apply()
        (self.live() / "epilog/sge").write_text("#!/bin/sh\n")
        (self.live() / "lib/gpulock/errors.py").unlink()
        super().__init__(root)

    def live(self) -> Path:
        """Return the folder that is in force."""
        return (self.hooks.folder / versions.CURRENT).resolve(strict=True)

    def live_files(self) -> dict[str, bytes]:
        files = [path for path in self.live().rglob("*") if path.is_file()]
        return {str(path.relative_to(self.live())): path.read_bytes() for path in files}

    def apply(self) -> None:
        self.hooks.write(Wanted.PRESENT)

    def undo(self) -> list[str]:
        raise NotImplementedError


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


@ALL_OR_SAMPLE
def test_a_repair_of_damaged_hooks_killed_anywhere_has_changed_none_or_all_of_those_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    site = KilledRepair(tmp_path / "site", monkeypatch)
    damaged, points = site.live_files(), site.points(site.install, share)
    whole = site.live_files()
    assert damaged.keys() < whole.keys()
    for point in points:
        site._put_back("before")
        assert run_killed(site.install, point)[0]
        assert site.live_files() in (damaged, whole), f"call {point}"
        site.install()
        assert site.live_files() == whole, f"call {point}"
