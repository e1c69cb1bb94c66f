# SPDX-License-Identifier: Apache-2.0
"""One judge for the locks of every scheduler: the rule is picked by the lock's own scheduler.

Hooks judge by their own scheduler's rule alone; this is what gpulockd and the commands use.
"""

from __future__ import annotations

from gpulock.alloc.liveness import Judge, process_verdict
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.sge.members import SgeMembers
from gpulock.sge.verdict import make_sge_rule
from gpulock.slurm.scontrol import SlurmctldClient
from gpulock.slurm.steps import SlurmSteps
from gpulock.slurm.verdict import SlurmJobRule


def make_liveness_judge(node: Node, control: SlurmctldClient | None = None) -> Judge:
    """Return a judge of every kind of lock this version knows; `control` asks slurmctld."""
    steps = SlurmSteps(node.settings)
    return Judge(
        node.boot_id,
        ProcessScan(node.proc, {"slurm": steps.owns}),
        {
            "sge": make_sge_rule(node),
            "slurm": SlurmJobRule(steps, control or SlurmctldClient(node.settings)),
            "process": process_verdict,
        },
        {"sge": SgeMembers(node), "slurm": steps.add_members},
    )
