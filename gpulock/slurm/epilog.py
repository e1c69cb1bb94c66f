# SPDX-License-Identifier: Apache-2.0
"""The Epilog of Slurm: give back what this job holds on this node, by its id and its user's.

Hot. It always exits 0: anything else drains the node. SLURM_JOB_GPUS is not asked, it may be
missing (docs/facts/slurm.md). What cannot be freed is left to the next claim and the reaper.
"""

import os

from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.release import ReleaseResult
from gpulock.deadline import Deadline
from gpulock.errors import Refusal
from gpulock.hooks.frame import HookRun, release_job
from gpulock.node.context import Node
from gpulock.node.procfs import TICKS, Proc
from gpulock.slurm import note
from gpulock.slurm.call import SlurmHookCall
from gpulock.slurm.steps import SlurmSteps
from gpulock.store.gate import Gate
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def main(environ: "Mapping[str, str]", config: str) -> int:
    """Run the Epilog; return 0."""
    run = HookRun(trial="SLURM_JOB_ID" not in environ)
    run.run(config, lambda node: release_slurm_job(node, SlurmHookCall(environ), run))
    if run.refusal is not None:
        who = f"epilog of job {environ.get('SLURM_JOB_ID', '?')[:20]}"
        run.log(run.refusal.sentence(who), error=True)
    return 0


def release_slurm_job(node: Node, call: SlurmHookCall, run: HookRun) -> ReleaseResult:
    """Release the job's locks on this node; raise Refusal."""
    begun = run.begun
    if not node.settings.simulation:
        begun = epilog_launch_time(node.proc, os.getpgrp())
    tokens: set[str] = set()
    ours = match_slurm_job(node, call, begun, tokens)

    def free() -> str:
        from gpulock.isolation import job

        return job.end_job_isolation(node, f"{call.job}.")

    try:
        return release_job(node, run, call.who, ours, lambda: make_slurm_epilog_judge(node), free)
    finally:
        remove_own_note(node, call, tokens)


def remove_own_note(node: Node, call: SlurmHookCall, tokens: set[str]) -> None:
    """Take the job's note away under the gate, where the next run's Prolog writes its own.

    While the gate is shut no Prolog writes one, so it goes then as well: a task that slurmd starts
    without a Prolog must find none.
    """
    own = note.TaskNote(call.slurmd, call.job, call.uid, call.restart)
    try:
        with Gate(node.store, Deadline(note.PATIENCE)):
            note.remove_task_note(node.store, own, tokens)
    except Refusal:
        note.remove_task_note(node.store, own, tokens)


def make_slurm_epilog_judge(node: Node) -> Judge:
    """Return a judge for an epilog: it judges nobody, and knows Slurm's steps and cgroups.

    slurmd calls an Epilog when the job's steps on this node are over, so a step daemon of that id
    is another node's on the same machine, and does not count.
    """
    steps = SlurmSteps(node.settings)
    scan = ProcessScan(node.proc, {"slurm": steps.owns})
    return Judge(node.boot_id, scan, {}, {"slurm": steps.add_members})


def epilog_launch_time(proc: Proc, group: int) -> float:
    """Return when slurmd launched this Epilog (CLOCK_BOOTTIME): with the leader of its group.

    slurmd puts an Epilog into a process group of its own. A slurmd that was killed leaves it
    behind, and a script of the site's may come to us late, when the job's next run has begun: that
    run's claims are younger than the leader. A claim of the same tick may be either run's, and
    where the leader is gone nobody knows: that is not freed here, the reaper will.
    """
    try:
        return proc.start(group) / TICKS
    except (OSError, ValueError):
        return 0.0


def match_slurm_job(
    node: Node, call: SlurmHookCall, begun: float, tokens: set[str]
) -> "Callable[[Owner], bool]":
    """Return what tells a record of this job: its id, its user, this run or an earlier one.

    The restart count of a requeued run's Epilog is the next run's already (docs/facts/slurm.md), so
    an Epilog that a killed slurmd left behind is recognised by the time: what was claimed after
    it began is a later run's. `tokens` get the claims that were found to be ours.
    """
    key = call.make_owner(node).key()

    def is_ours(record: Owner) -> bool:
        if record.key() != key or record.uid != call.uid or record.restart > call.restart:
            return False
        if record.boot_id == node.boot_id and record.claimed_boottime > begun:
            return False
        tokens.add(record.token)
        return True

    return is_ours
