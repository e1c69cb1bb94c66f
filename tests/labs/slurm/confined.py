# SPDX-License-Identifier: Apache-2.0
"""A node of the Slurm lab with ISOLATION=cgroup, and device nodes that have no driver."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from gpulock.install.hooks import HookPaths
from tests.labs.common.confined_node import ConfinedNode
from tests.labs.common.device_nodes import Service, make_nodes
from tests.labs.common.installed import script
from tests.labs.slurm.config import UNIFIED
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, SLURM_CONF, Mode, by_gpulock, settings
from tests.labs.slurm.processes import step_daemons_group

COUNT: Final = 4
EVERY: Final = frozenset(f"nvidia{n}" for n in range(COUNT))
PAM: Final = "account required pam_permit.so\nsession required pam_exec.so {hook}\n"
WITH_PAM: Final = {**SLURM_CONF, "UsePAM": "1"}
# a step daemon may end when the Epilog has begun; what it leaves then is the reaper's
LATE: Final = """#!/bin/sh
tries=1200
while [ $((tries -= 1)) -gt 0 ] &&
    /usr/bin/pgrep -f "^slurmstepd: \\[$SLURM_JOB_ID\\." >/dev/null; do /bin/sleep 0.05; done
exec {epilog}
"""


class Site(ConfinedNode):
    """A compute node that confines its jobs."""

    def __init__(self, gpus: Gpulock, dev: Path, selection: str) -> None:
        beside = step_daemons_group(NODE) if UNIFIED else None
        slurmd = gpus.slurm.slurmd_pid(NODE)
        service = Service("gpulock-lab-slurmd.service", slurmd, beside=beside)
        super().__init__(gpus, NODE, dev, service)
        self.gpus = gpus
        self.slurm = gpus.slurm
        self.selection = selection

    def configure(self, **changes: str) -> None:
        keys = {"ISOLATION": "cgroup", "SYS_ROOT": "/sys", "DEV_ROOT": str(self.dev), **changes}
        keys["SLURM_DEVICE_SELECTION"] = self.selection
        self.gpus.configure(NODE, **settings(self.gpus, **keys))

    def submit(self, *asked: str, text: str) -> JobId:
        """Submit a job of slalice to the node."""
        return self.slurm.submit("slalice", "-w", NODE, *asked, script=text)


@contextlib.contextmanager
def confined_site(slurm_gpus: Gpulock, mode: Mode = by_gpulock, **setup: Any) -> Generator[Site]:
    """Give a test such a node, and leave nothing of it; `setup` are fields of the lab's."""
    epilog = script(slurm_gpus, "epilog", LATE.format(epilog=slurm_gpus.setup.hooks["Epilog"]))
    hooks = {**slurm_gpus.setup.hooks, "Epilog": epilog}
    mode(slurm_gpus, extra=WITH_PAM, hooks=hooks, **setup)
    session = HookPaths(slurm_gpus.slurm.lab / "hooks").folder / "prolog/slurm-session"
    stack = slurm_gpus.slurm.path_in(NODE, "/etc/pam.d/slurm")
    stack.write_text(PAM.format(hook=session))
    dev = slurm_gpus.slurm.lab / "nodes"
    make_nodes(dev, COUNT)
    try:
        made = Site(slurm_gpus, dev, "gpulock" if mode is by_gpulock else "slurm")
        try:
            made.configure()
            yield made
            slurm_gpus.slurm.clear_jobs()
        finally:
            made.service.close()
    finally:
        stack.unlink()
        shutil.rmtree(dev)
