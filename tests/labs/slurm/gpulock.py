# SPDX-License-Identifier: Apache-2.0
"""gpulock on the nodes of the Slurm lab: simulated drivers, real hooks under real slurmds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulock.install.hooks import HookPaths, render_hooks
from gpulock.simulate.node import write_simulated_node
from tests.labs.common.installed import CONFIG, Installed
from tests.labs.slurm.config import Setup
from tests.labs.slurm.lab import Slurm
from tests.support.wait import LabError

__all__ = ["CONFIG"]


@dataclass(frozen=True)
class Gpulock(Installed):
    """gpulock as installed on every node of a lab; `setup` is what `prepare` goes back to."""

    slurm: Slurm
    setup: Setup

    @property
    def cluster(self) -> Slurm:
        """Return the lab."""
        return self.slurm

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of its nodes."""
        return self.slurm.nodes

    def prepare(self, **changes: Any) -> None:
        """Put every node into the state after installation; `changes` are fields of the setup."""
        self.clear()
        wanted = dataclasses.replace(self.setup, **changes)
        if wanted != self.slurm.setup:
            self.slurm.reconfigure(**vars(wanted))

    def clear(self) -> None:
        """Let no node know of any job, whatever Slurm's setup is."""
        for node in self.slurm.nodes:
            self.configure(node)
            self.forget(node)

    def configure(self, node: str, **changes: str) -> None:
        """Write a node's settings, with some of them changed."""
        self.write_settings(node, **{"EXPECTED_GPUS": str(self.setup.gpus), **changes})

    def device(self, node: str, minor: int) -> Path:
        """Return the file that gpulock takes for a device's node: one that can be held open."""
        return self.drivers / node / "dev" / f"nvidia{minor}"

    def status(self, node: str) -> dict[str, Any]:
        """Return what `gpulock status --json` says on a node."""
        done = self.command(node, "status", "--json")
        if done.returncode != 0:
            raise LabError(f"gpulock status on {node}: {done.stdout}{done.stderr}")
        document: dict[str, Any] = json.loads(done.stdout)
        return document


def hook_programs(paths: HookPaths) -> dict[str, Path]:
    """Return the program that each key of slurm.conf is to name."""
    return {
        "Prolog": paths.slurm_prolog,
        "TaskProlog": paths.slurm_task,
        "Epilog": paths.slurm_epilog,
    }


def installed(slurm: Slurm) -> Gpulock:
    """Install hooks and simulated drivers into a lab's scratch folder."""
    drivers = slurm.lab / "drivers"
    for node in slurm.nodes:
        write_simulated_node(drivers / node, "dgx1", slurm.setup.gpus)
    hooks = hook_programs(render_hooks(slurm.lab / "hooks", Path(CONFIG)))
    setup = dataclasses.replace(slurm.setup, hooks=hooks)
    return Gpulock(drivers, slurm, setup)
