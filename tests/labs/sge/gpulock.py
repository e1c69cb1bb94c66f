# SPDX-License-Identifier: Apache-2.0
"""gpulock on the nodes of the Grid Engine lab: simulated drivers, real hooks under real execds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gpulock.install.hooks import HookPaths, render_hooks
from gpulock.install.sge.queue_hooks import hook_line
from gpulock.simulate.node import write_simulated_node
from tests.labs.common.installed import CONFIG, Installed
from tests.labs.sge.cluster import NODES
from tests.labs.sge.install import INSTALLATION
from tests.labs.sge.lab import GridEngine

__all__ = ["CONFIG"]
GPUS = 8


@dataclass(frozen=True)
class Gpulock(Installed):
    """gpulock as installed on every node of a lab; `node` is a name of `NODES`."""

    sge: GridEngine
    hooks: HookPaths

    @property
    def cluster(self) -> GridEngine:
        """Return the lab."""
        return self.sge

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of its nodes."""
        return NODES

    def prepare(self) -> None:
        """Put every node into the state after installation: no locks, no faults, hooks set."""
        for node in NODES:
            self.configure(node)
            self.forget(node)
        self.sge.set_hooks(self.line("prolog"), self.line("epilog"))

    def line(self, hook: str) -> str:
        """Return the line of a queue that starts a hook."""
        return hook_line(self.hooks.folder, hook)

    def configure(self, node: str, **changes: str) -> None:
        """Write a node's settings, with some of them changed."""
        keys = {
            "EXPECTED_GPUS": str(GPUS),
            "SGE_ROOT": self.sge.env["SGE_ROOT"],
            "SGE_CELL": "gpulock",
            "SGE_COMPLEXES": "gpu gpuj",
        }
        self.write_settings(node, **{**keys, **changes})


def installed(sge: GridEngine) -> Gpulock:
    """Install hooks and simulated drivers into a lab's scratch folder."""
    drivers = sge.lab / "drivers"
    for node in NODES:
        write_simulated_node(drivers / node, "dgx1", GPUS)
    hooks = render_hooks(sge.lab / "hooks", Path(CONFIG))
    name_shepherd(hooks.folder / "prolog/sge_shepherd", str(INSTALLATION.shepherd))
    return Gpulock(drivers, sge, hooks)


def name_shepherd(launcher: Path, shepherd: str) -> str:
    """Let a launcher become another shepherd, as SGE_SHEPHERD does; return the one before."""
    text = launcher.read_text()
    before = re.search(r"(?m)^SHEPHERD=(.*)$", text)
    assert before
    launcher.write_text(text.replace(before[0], f"SHEPHERD={shepherd}"))
    return before[1]
