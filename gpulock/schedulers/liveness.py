# SPDX-License-Identifier: Apache-2.0
"""One judge for the locks of every scheduler: the rule is picked by the lock's own scheduler.

Hooks judge by their own scheduler's rule alone; this is what gpulockd and the commands use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from gpulock.alloc import liveness
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.sge.members import SgeMembers
from gpulock.sge.verdict import make_sge_rule
from gpulock.slurm import verdict
from gpulock.slurm.scontrol import SlurmctldClient
from gpulock.slurm.steps import SlurmSteps
from gpulock.store.locks import Lock
from gpulock.store.verdicts import Verdict

if TYPE_CHECKING:
    from gpulock.alloc.job_processes import JobMembers, JobProcesses
    from gpulock.alloc.process_scan import ClaimMembership


def make_liveness_judge(node: Node, control: Callable[[], SlurmctldClient] | None = None) -> Judge:
    """Return a judge of every kind of lock this version knows; `control` makes what asks slurmctld.

    What a scheduler's locks need is made for the first of them.
    """

    settings = node.settings

    @cache
    def steps() -> SlurmSteps:
        return SlurmSteps(settings)

    @cache
    def rule(scheduler: str) -> liveness.LivenessRule:
        if scheduler == "sge":
            return make_sge_rule(node)
        return verdict.SlurmJobRule(steps(), control() if control else SlurmctldClient(settings))

    def judge_job(
        lock: Lock, scan: ProcessScan, job_processes: Callable[[Lock], JobProcesses]
    ) -> Verdict:
        return rule(lock.owner.scheduler if lock.owner else "")(lock, scan, job_processes)

    rules: dict[str, liveness.LivenessRule] = {
        "sge": judge_job,
        "slurm": judge_job,
        "process": liveness.process_verdict,
    }
    members: dict[str, JobMembers] = {
        "sge": SgeMembers(node),
        "slurm": lambda lock, scan, job: steps().add_members(lock, scan, job),
    }
    owns: dict[str, ClaimMembership] = {
        "slurm": lambda pid, record, tree: steps().owns(pid, record, tree)
    }
    return Judge(node.boot_id, ProcessScan(node.proc, owns), rules, members)
