# SPDX-License-Identifier: Apache-2.0
"""Whether gpulockd serves users: USER_CLAIMS=yes, and no scheduler that owns this node."""

from __future__ import annotations

import os

from gpulock.alloc.process_reader import is_root_program
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.sge.shepherds import EXECD
from gpulock.slurm.gres_map import NAME as SLURM_MAP
from gpulock.slurm.steps import SLURMD

LOOK_EVERY = 600.0  # seconds between two looks for a scheduler's daemon


class ServePolicy:
    """The answer, which costs a look at all processes now and then; `why_not` says no."""

    def __init__(self) -> None:
        self._next = 0.0
        self._daemon: str | None = None  # none was seen yet

    def why_not(self, node: Node, now: float) -> str:
        """Return why users are not served, nothing where they are."""
        if not node.settings.user_claims:
            return "USER_CLAIMS is not set"
        if told := scheduler_from_settings(node):
            return told
        if node.settings.simulation:
            return ""
        if now >= self._next:
            self._next = now + LOOK_EVERY
            scan = ProcessScan(node.proc)
            scan.restrict({0: "root"})
            found = scheduler_from_processes(scan)
            if not found and scan.partial:  # what was seen before counts, if anything
                found = scan.blind if self._daemon is None else self._daemon
            self._daemon = found
        return self._daemon or ""

    def recheck_processes(self) -> None:
        """Look at the processes the next time."""
        self._next = 0.0


def scheduler_from_settings(node: Node) -> str:
    """Return which scheduler the hooks were installed for, or nothing."""
    if node.settings.sge_root:
        return "SGE_ROOT is set: Grid Engine owns this node"
    if os.path.exists(f"{node.settings.state_dir}/{SLURM_MAP}"):
        return f"STATE_DIR has a {SLURM_MAP}: Slurm owns this node"
    return ""


def scheduler_from_processes(scan: ProcessScan) -> str:
    """Return which scheduler's daemon is seen to run here as root, or nothing."""
    for name in (EXECD, SLURMD):
        for pid in scan.named(name):
            if scan.status(pid).uids[0] == 0 and is_root_program(scan.proc, pid, name):
                return f"{name} runs here (pid {pid})"
    return ""
