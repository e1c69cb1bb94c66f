# SPDX-License-Identifier: Apache-2.0
"""Slave tasks (`qrsh -inherit`) of a parallel job: Grid Engine runs no prolog for them.

Hot. `shepherd_cmd` is gpulock's launcher: in a task's directory it runs this program and then
becomes the real shepherd, with the same pid and start time; these anchor the lock. The first task
of a job on a host claims for all of the job's slots there; later ones share that grant. Nothing
runs at a task's end: the next claim, the reaper or the job's epilog frees. A task that may not
have its GPUs gets an empty mask and GPULOCK_REFUSED, which the starter method reports.
"""

import os

from gpulock.alloc.claim import Grant
from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal
from gpulock.hooks.frame import HookRun, format_grant
from gpulock.job import environment
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.sge import environment_file, hook, request, spool
from gpulock.sge.claim import (
    ALL_NAMES,
    EXTRA_MASK_NAMES,
    check_isolation,
    claim_sge_devices,
    isolate_sge_job,
    make_sge_owner,
    mask_sge_job,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

UP = "../../.."  # active_jobs/J.T/N.host: one deeper than a job
REFUSED = "GPULOCK_REFUSED"


def main(argv: list[str], environ: "Mapping[str, str]", config: str) -> int:
    """Claim for the task whose shepherd-to-be is argv[1]; return 0 when it may start."""
    call = hook.SgeHookCall(argv, environ)
    run, spools = HookRun(), list[spool.Spool]()

    def claim(node: Node) -> "Grant | None":
        job_spool = spool.open_shepherd_spool(node.proc, call.shepherd)
        spools.append(job_spool)
        call.who = f"job {job_spool.job}.{job_spool.task}, task {os.path.basename(job_spool.path)}"
        check_isolation(node.settings, job_spool)
        if node.settings.sge_slave_tasks or on_master_host(job_spool):
            return claim_slave_task(node, job_spool, run.deadline)
        isolate_sge_job(node, job_spool, [])
        return None

    os.setresuid(0, 0, 0)  # execd runs shepherds with euid of the admin user, ruid 0
    grant = run.run(config, claim)
    if run.refusal is None:
        run.log(format_grant(call.who, grant, run.seconds()))
        return hook.DONE
    sentence = run.refusal.sentence(call.who)
    run.log(sentence)
    return mask_refused_task(spools[0] if spools else None, run.settings, sentence)


def claim_slave_task(node: Node, job_spool: spool.Spool, deadline: Deadline) -> "Grant | None":
    """Give the task the GPUs of its job on this host; raise Refusal."""
    job = request.read_execd_job(job_spool, UP)
    home = on_master_host(job_spool)
    kinds = request.count_job_kinds(job_spool, node.settings, job)
    per_job = request.is_per_job_request(job.requests, node.settings.sge_complexes)
    # a per-job complex is debited on the master host alone
    if not kinds or (job.granted is None and not home and per_job):
        mask_sge_job(node, job_spool)
        return None
    if home and not job_holds_lock(node, make_sge_owner(node, job_spool, job.uid).key()):
        raise Refusal(UNKNOWN, "the job holds no GPU on its master host", "see gpulock why")
    return claim_sge_devices(node, job_spool, job, kinds, deadline)


def on_master_host(job_spool: spool.Spool) -> bool:
    """Return whether the job's own shepherd is on this host: its directory is above the task's."""
    try:
        os.stat("../config", dir_fd=job_spool.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def job_holds_lock(node: Node, key: tuple[str, str, str, str, str]) -> bool:
    """Return whether a job holds a lock here: on its master host only its prolog claims."""
    return any(
        [lock.owner and lock.owner.key() == key for lock in node.store.read_all_locks().values()]
    )


def mask_refused_task(
    job_spool: "spool.Spool | None", settings: "Settings | None", sentence: str
) -> int:
    """Let the task start without a GPU and with the reason; return 1 when even that fails."""
    if job_spool is None or settings is None:
        return 1
    try:
        check_isolation(settings, job_spool)
        isolate_sge_job(Node(settings), job_spool, [])
        pairs = [*environment.grant_variables([], settings, EXTRA_MASK_NAMES), (REFUSED, sentence)]
        environment_file.write_sge_env_file(job_spool, pairs, ALL_NAMES, "", settings.mps_dir)
    except Refusal:
        return 1
    return 0
