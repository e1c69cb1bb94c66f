# SPDX-License-Identifier: Apache-2.0
"""A killed `install slurm --write-conf` leaves nothing that another run does not complete."""

from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from gpulock.install.slurm import gres
from gpulock.install.slurm.site import SlurmSite
from tests.support.killed import ALL_OR_SAMPLE, KilledSite
from tests.support.slurm_node import SlurmNode

pytestmark = pytest.mark.slow
SLURM = 998  # who slurm.conf belongs to, where root may give it away


def gres_conf_size(path: str) -> str:
    """Return what stands for the version of a gres.conf whose time each try changes."""
    return str(os.stat(path).st_size)


class KilledSlurm(KilledSite):
    """A node of a recorded Slurm, with the controller's slurm.conf and pyxis."""

    def __init__(self, node: SlurmNode, patch: pytest.MonkeyPatch) -> None:
        self.node = node
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
        self.node.install(write_conf=True, spank=True)

    def undo(self) -> list[str]:
        return self.node.uninstall(write_conf=True).clauses()


@pytest.fixture
def played(node: SlurmNode, monkeypatch: pytest.MonkeyPatch) -> KilledSlurm:
    return KilledSlurm(node, monkeypatch)


@ALL_OR_SAMPLE
def test_an_installation_killed_anywhere_is_taken_back_or_completed(
    played: KilledSlurm, share: int
) -> None:
    assert played.killed_installations(share) == []


@ALL_OR_SAMPLE
def test_an_uninstallation_killed_anywhere_is_completed_by_another(
    played: KilledSlurm, share: int
) -> None:
    assert played.killed_uninstallations(share) == []
