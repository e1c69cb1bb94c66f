# SPDX-License-Identifier: Apache-2.0
"""Another release of gpulock on a node of a real Slurm whose jobs begin, run and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.hooks import HookPaths
from gpulock.install.installed import Installation
from tests.labs.common.upgrade import JOBS, PREFIX, Package, UpgradedNode, upgrade_and_go_back
from tests.labs.slurm.config import CPUS
from tests.labs.slurm.gpulock import Gpulock, hook_programs
from tests.labs.slurm.jobs import SOAK
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, Mode, by_gpulock, by_slurm
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


class SlurmNode(UpgradedNode):
    """One compute node."""

    def __init__(self, gpus: Gpulock, place: Path) -> None:
        super().__init__(gpus, NODE, Package(place), gpus.journal)
        self.slurm = gpus.slurm

    def submit(self, devices: int, script: str) -> int:
        asked = ("-w", NODE, *((f"--gres=gpu:{devices}",) if devices else ()))
        job = self.slurm.submit("slalice", *asked, script=script)
        # One by one: the end of a Prolog may be seen no sooner than that of a job which begins at
        # the same time (docs/facts/slurm.md, "Output of a hook").
        launched, log = f"Launching batch job {job} for UID", self.slurm.lab / f"log/{NODE}.log"
        wait_until(
            lambda: launched in log.read_text(errors="replace"),
            why=f"the Prolog of job {job} to be over",
        )
        return job

    def wait_running(self, job: int) -> None:
        self.slurm.wait_state(JobId(job), "RUNNING")
        begun = f" {job} {NODE} "  # a job whose Prolog is at work runs, for Slurm
        wait_until(lambda: begun in self.journal.path.read_text(), why=f"job {job} to begin")

    def wait_done(self, job: int) -> None:
        slurm = self.slurm
        assert slurm.wait_settled(JobId(job)) == "COMPLETED", slurm.said(JobId(job))
        assert slurm.job(JobId(job))["Restarts"] == "0"

    def troubles(self) -> list[str]:
        return [NODE] if self.slurm.is_out(NODE) else []


def name_hooks(gpus: Gpulock) -> None:
    """Have the map say where the hooks are, as `install slurm` writes it."""
    place = gpus.slurm.path_in(NODE, "/var/lib/gpulock/slurm-map")
    pairs = [f"{key}={value}\n" for key, value in Installation(PREFIX).pairs()]
    place.write_text("".join([place.read_text(), *pairs]))


def keep_older_copy(gpus: Gpulock) -> None:
    """Leave what the older `install slurm` wrote beside its map: a copy of gres.conf."""
    state = gpus.slurm.path_in(NODE, "/var/lib/gpulock")
    pairs = dict(line.split("=", 1) for line in (state / "slurm-map").read_text().splitlines()[1:])
    (state / "slurm-gres.conf").write_bytes(Path(pairs["gres_conf"]).read_bytes())


@pytest.mark.parametrize("mode", [by_slurm, by_gpulock] if SOAK else [by_slurm])
def test_jobs_go_on_while_gpulock_is_upgraded_and_downgraded(
    slurm_gpus: Gpulock, mode: Mode, tmp_path: Path
) -> None:
    hooks = hook_programs(HookPaths(PREFIX / "current"))
    mode(slurm_gpus, hooks=hooks, cpus=max(CPUS, JOBS + 20))
    name_hooks(slurm_gpus)
    keep_older_copy(slurm_gpus)
    node = SlurmNode(slurm_gpus, tmp_path / "package")

    upgrade_and_go_back(node, tmp_path, slurm_gpus.setup.gpus)
