# SPDX-License-Identifier: Apache-2.0
"""gpulock on the nodes of the Slurm lab: simulated drivers, real hooks under real slurmds."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.deadline import Deadline
from gpulock.install.hooks import render_hooks
from gpulock.node.context import Node
from gpulock.node.settings import parse_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.store.owner import Owner
from gpulock.workstation import process_claims
from tests.labs.common.lock_folder import owners
from tests.labs.sge.wait import PATIENCE, LabError, until
from tests.labs.slurm.config import Setup
from tests.labs.slurm.journal import Journal
from tests.labs.slurm.lab import JobId, Slurm

CONFIG: Final = "/etc/gpulock/gpulock.conf"
REPOSITORY: Final = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Gpulock:
    """gpulock as installed on every node of a lab; `setup` is what `prepare` goes back to."""

    slurm: Slurm
    setup: Setup
    drivers: Path
    journal: Journal

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
            for folder in ("/run/gpulock", "/var/lib/gpulock"):
                for inner in self.slurm.path_in(node, folder).iterdir():
                    shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
        self.journal.clear()

    def configure(self, node: str, **changes: str) -> None:
        """Write a node's settings, with some of them changed."""
        tree = self.drivers / node
        keys = {
            "DRIVER_ROOT": f"{tree}/proc/driver/nvidia",
            "SYS_ROOT": f"{tree}/sys",
            "DEV_ROOT": f"{tree}/dev",
            "EXPECTED_GPUS": str(self.setup.gpus),
            **changes,
        }
        text = "".join(f"{key}={value}\n" for key, value in keys.items())
        self.slurm.path_in(node, CONFIG).write_text(text)

    def device(self, node: str, minor: int) -> Path:
        """Return the file that gpulock takes for a device's node: one that can be held open."""
        return self.drivers / node / "dev" / f"nvidia{minor}"

    def locks(self, node: str) -> dict[str, Owner]:
        """Return the owner of every lock of a node."""
        return owners(self.slurm.path_in(node, "/run/gpulock/locks"))

    def held_by(self, job: JobId) -> dict[str, list[str]]:
        """Return the devices a job holds, by node."""
        return {
            node: [name for name, record in self.locks(node).items() if record.job_id == str(job)]
            for node in self.slurm.nodes
        }

    def wait_free(self, *, seconds: float = PATIENCE) -> None:
        """Wait until no node has a lock."""
        until(
            lambda: not any(self.locks(node) for node in self.slurm.nodes),
            what="all locks to be gone",
            seconds=seconds,
            why=lambda: str({node: self.locks(node) for node in self.slurm.nodes}),
        )

    def command(self, node: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `gpulock` as root on a node."""
        start = "from gpulock.cli import main; main()"
        line = [sys.executable, "-c", start, "--config", CONFIG, *words]
        return self.slurm.run_in(node, line, env={"PYTHONPATH": str(REPOSITORY)})

    def status(self, node: str) -> dict[str, Any]:
        """Return what `gpulock status --json` says on a node."""
        done = self.command(node, "status", "--json")
        if done.returncode != 0:
            raise LabError(f"gpulock status on {node}: {done.stdout}{done.stderr}")
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def node(self, name: str) -> Node:
        """Return a node as its own root would see it, for use inside this process."""
        settings = parse_settings(self.slurm.path_in(name, CONFIG).read_text(), CONFIG)
        settings.lock_dir = str(self.slurm.path_in(name, "/run/gpulock"))
        settings.state_dir = str(self.slurm.path_in(name, "/var/lib/gpulock"))
        return Node(settings, name)

    def reconcile(self, name: str) -> ReconcileReport:
        """Reconcile a node once, as `gpulock reap` there does."""
        node = self.node(name)
        return reconcile_locks(node, process_claims.make_liveness_judge(node), Deadline(20))


def installed(slurm: Slurm, preset: str = "dgx1") -> Gpulock:
    """Install hooks and simulated drivers into a lab's scratch folder."""
    drivers = slurm.lab / "drivers"
    for node in slurm.nodes:
        write_simulated_node(drivers / node, preset, slurm.setup.gpus)
    paths = render_hooks(slurm.lab / "hooks", Path(CONFIG))
    hooks = {
        "Prolog": paths.slurm_prolog,
        "TaskProlog": paths.slurm_task,
        "Epilog": paths.slurm_epilog,
    }
    setup = dataclasses.replace(slurm.setup, hooks=hooks)
    return Gpulock(slurm, setup, drivers, Journal(slurm.lab / "journal"))
