# SPDX-License-Identifier: Apache-2.0
"""A killed installation leaves nothing that another run does not complete, or take back."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from gpulock.install.items import FileItem, Item, Wanted, run_items
from gpulock.install.sge.qconf import Qconf
from gpulock.install.slurm import gres
from gpulock.install.systemd import install
from gpulock.install.systemd.units import DAEMON
from tests.support.install_site import ignore, make_site
from tests.support.killed import ALL_OR_SAMPLE, KilledSite, Left
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
