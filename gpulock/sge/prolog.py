# SPDX-License-Identifier: Apache-2.0
"""The prolog of Grid Engine: claim what the job was granted, and tell the job.

Hot. Exit codes: 0 run, 99 requeue, 100 job in error, 1 queue in error (docs/grid-engine.md).
"""

import errno

from gpulock.alloc.claim import Grant, count_unknown_refusal
from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, UNKNOWN, Refusal, UnexpectedError
from gpulock.hooks.frame import HookRun, format_grant, log_hook_line
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.sge import hook, request
from gpulock.sge.claim import check_isolation, claim_sge_devices, mask_sge_job
from gpulock.sge.spool import Spool
from gpulock.sge.spooled_job import LayoutError, SgeJob
from gpulock.store.event_kinds import REFUSED
from gpulock.store.events import note_event
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LIMITED = (errno.EFBIG, errno.ENOMEM, errno.EAGAIN, errno.EMFILE)  # what a job's limits cause
LAUNCHER_MARKER = b"GPULOCK_LAUNCHER=1"  # in a shepherd's environment that shepherd_cmd started


def main(argv: list[str], environ: "Mapping[str, str]", config: str) -> int:
    """Run the prolog; return the exit code."""
    call = hook.SgeHookCall(argv, environ)
    run, claimant = HookRun(call.tried), Owner(job_id=call.job, task_id=call.array_task)
    grant = run.run(
        config, lambda node: claim_sge_job(node, call, claimant, run.deadline), claimant
    )
    refusal = run.refusal
    if refusal is None:
        run.log(format_grant(call.who, grant, run.seconds()))
        if not call.site:
            return hook.DONE
        from gpulock.sge import site_hook

        refusal = site_hook.become_site_prolog(call, environ)
        if refusal.kind == UNKNOWN and run.settings is not None:
            count_unknown_refusal(Node(run.settings), refusal, claimant, run.deadline)
    if call.limited:
        refusal = blame_job_limits(refusal)
    run.log(refusal.sentence(call.who), error=True)
    if run.settings is not None:
        sentence = refusal.sentence(call.who)
        note_event(run.settings.lock_dir, REFUSED, call.job, sentence)
    return sge_hook_exit_code(refusal, run.settings)


def claim_sge_job(
    node: Node, call: hook.SgeHookCall, claimant: Owner, deadline: Deadline
) -> "Grant | None":
    """Claim and tell the job; return the grant, None for a job without GPUs; raise Refusal.

    `claimant` is whose refusal counts towards a broken node; the user is filled in.
    """
    try:
        job_spool = hook.find_spool(node, call)
        claimant.user = job_spool.need("job_owner")
        kinds, job = request.read_sge_job_gpus(job_spool, node.settings)
    except Refusal as refusal:
        # An unknown Grid Engine makes every job wait, and stops no queue: doctor tells.
        if refusal.kind == UNKNOWN and not isinstance(refusal.__cause__, LayoutError):
            claimant.user = claimant.user or f"job {call.job}"
            count_unknown_refusal(node, refusal, claimant, deadline)
        raise
    check_host_count(node, job_spool, job if kinds or job.granted else None)
    check_isolation(node.settings, job_spool)
    if kinds:
        return claim_sge_devices(node, job_spool, job, kinds, deadline, claimant)
    for name in request.list_unknown_gpu_requests(job):
        line = f"{call.who}: asks for {name}, which is not in SGE_COMPLEXES, and gets no GPU"
        log_hook_line(node.settings, f"gpulock: {line}; see gpulock doctor", error=True)
    mask_sge_job(node, job_spool)
    return None


def check_host_count(node: Node, job_spool: Spool, job: "SgeJob | None") -> None:
    """Raise Refusal for a parallel job whose tasks would have GPUs nobody locks, or confines.

    `job` is None without GPUs. Slave tasks have no prolog: SGE_SLAVE_TASKS or a per-job complex
    gives them theirs, and our shepherd_cmd alone confines them, also on the job's own host. It has
    started this job's shepherd where Grid Engine's configuration has it: the job's owner has no
    part in that environment.
    """
    settings = node.settings
    must_confine = settings.isolation == "cgroup"
    locked = job is None or settings.sge_slave_tasks
    if locked and not must_confine:
        return
    if job_spool.need("pe") == "none":
        return
    if must_confine:
        try:
            marks = node.proc.read(job_spool.pid, "environ").split(b"\0")
        except OSError as fault:
            why = f"the shepherd {job_spool.pid} cannot be seen: {fault}"
            raise Refusal(UNKNOWN, why, "see gpulock doctor") from fault
        if LAUNCHER_MARKER not in marks:
            raise Refusal(
                INVALID_REQUEST,
                "a parallel job, but nothing would keep its tasks from other jobs' GPUs",
                "ask for no parallel environment, or have shepherd_cmd set (docs/grid-engine.md)",
            )
    if locked or job is None or not request.has_gpus_elsewhere(job_spool, settings, job):
        return
    raise Refusal(
        INVALID_REQUEST,
        "GPUs on several hosts, but this site gives slave tasks none",
        "use a parallel environment of one host, or ask for SGE_SLAVE_TASKS=yes",
    )


def sge_hook_exit_code(refusal: Refusal, settings: "Settings | None") -> int:
    """Return what Grid Engine is told (docs/grid-engine.md, what a job sees)."""
    if refusal.kind == INVALID_REQUEST:
        return hook.JOB_ERROR
    if refusal.kind == BUSY and settings is not None and settings.on_busy == "error":
        return hook.JOB_ERROR
    if refusal.kind == BROKEN and (settings is None or settings.on_broken == "stop"):
        return hook.QUEUE_ERROR
    return hook.REQUEUE


def blame_job_limits(refusal: Refusal) -> Refusal:
    """Blame the job's own limits for what went wrong under them: no user stops a node."""
    cause = refusal.__cause__
    limited = isinstance(cause, OSError) and cause.errno in LIMITED
    if not (refusal.kind == BROKEN or limited or isinstance(refusal, UnexpectedError)):
        return refusal
    return Refusal(
        INVALID_REQUEST,
        f"under the job's own limits (h_vmem, h_data, h_stack, h_fsize): {refusal.why}",
        "ask for higher limits",
    )
