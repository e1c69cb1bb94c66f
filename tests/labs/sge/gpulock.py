# SPDX-License-Identifier: Apache-2.0
"""gpulock on the nodes of the Grid Engine lab: simulated drivers, real hooks under real execds."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.deadline import Deadline
from gpulock.install.hooks import HookPaths, render_hooks
from gpulock.install.sge.texts import hook_command
from gpulock.node.context import Node
from gpulock.node.settings import parse_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.store.owner import Owner
from gpulock.workstation import process_claims
from tests.labs.common.lock_folder import owners
from tests.labs.sge.cluster import NODES
from tests.labs.sge.lab import GridEngine, JobId
from tests.labs.sge.wait import PATIENCE, until

CONFIG = "/etc/gpulock/gpulock.conf"
GPUS = 8


@dataclass(frozen=True)
class Gpulock:
    """gpulock as installed on every node of a lab; `node` is a name of `NODES`."""

    sge: GridEngine
    hooks: HookPaths
    drivers: Path

    def prepare(self) -> None:
        """Put every node into the state after installation: no locks, no faults, hooks set."""
        for node in NODES:
            self.configure(node)
            for folder in ("/run/gpulock", "/var/lib/gpulock"):
                place = self.sge.path_in(node, folder)
                place.mkdir(mode=0o755, parents=True, exist_ok=True)
                for inner in place.iterdir():
                    shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
        self.sge.set_hooks(self.line("prolog"), self.line("epilog"))

    def line(self, hook: str) -> str:
        """Return the line of a queue that starts a hook."""
        return hook_command(self.hooks.folder, hook)

    def configure(self, node: str, **changes: str) -> None:
        """Write a node's settings, with some of them changed."""
        tree = self.drivers / node
        keys = {
            "DRIVER_ROOT": f"{tree}/proc/driver/nvidia",
            "SYS_ROOT": f"{tree}/sys",
            "DEV_ROOT": f"{tree}/dev",
            "EXPECTED_GPUS": str(GPUS),
            "SGE_ROOT": self.sge.env["SGE_ROOT"],
            "SGE_CELL": "gpulock",
            "SGE_COMPLEXES": "gpu gpuj",
            **changes,
        }
        place = self.sge.path_in(node, CONFIG)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(f"{key}={value}\n" for key, value in keys.items()))

    def locks(self, node: str) -> dict[str, Owner]:
        """Return the owner of every lock of a node."""
        return owners(self.sge.path_in(node, "/run/gpulock/locks"))

    def held_by(self, job: JobId) -> dict[str, list[str]]:
        """Return the devices a job holds, by node."""
        return {
            node: [name for name, record in self.locks(node).items() if record.job_id == str(job)]
            for node in NODES
        }

    def wait_free(self, *, seconds: float = PATIENCE) -> None:
        """Wait until no node has a lock."""
        until(
            lambda: not any(self.locks(node) for node in NODES),
            what="all locks to be gone",
            seconds=seconds,
            why=lambda: str({node: self.locks(node) for node in NODES}),
        )

    def node(self, name: str) -> Node:
        """Return a node as its own root would see it, for use inside this process."""
        settings = parse_settings(self.sge.path_in(name, CONFIG).read_text(), CONFIG)
        settings.lock_dir = str(self.sge.path_in(name, "/run/gpulock"))
        settings.state_dir = str(self.sge.path_in(name, "/var/lib/gpulock"))
        return Node(settings, name)

    def reconcile(self, name: str) -> ReconcileReport:
        """Reconcile a node once, as `gpulock reap` there does."""
        node = self.node(name)
        return reconcile_locks(node, process_claims.make_liveness_judge(node), Deadline(20))


def installed(sge: GridEngine) -> Gpulock:
    """Install hooks and simulated drivers into a lab's scratch folder."""
    drivers = sge.lab / "drivers"
    for node in NODES:
        write_simulated_node(drivers / node, "dgx1", GPUS)
    hooks = render_hooks(sge.lab / "hooks", Path(CONFIG))
    return Gpulock(sge, hooks, drivers)
