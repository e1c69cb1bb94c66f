# SPDX-License-Identifier: Apache-2.0
"""The prolog of Grid Engine: claim what the job was granted, and tell the job.

Hot. Exit codes: 0 run, 99 requeue, 100 job in error, 1 queue in error (docs/grid-engine.md).
"""

import os

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices, count_unknown_refusal
from gpulock.deadline import Deadline
from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal, os_error_kind
from gpulock.hooks.frame import (
    HookRun,
    complete_claim,
    format_grant,
    log_hook_line,
    undo_claim,
)
from gpulock.job import environment
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.sge import environment_file, hook, request, spool
from gpulock.sge.spool import Spool
from gpulock.sge.spooled_job import LayoutError, SgeJob
from gpulock.store import atomic, events, grants, owner
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

EXTRA_MASK_NAMES = ("SGE_GPU",)  # the name that other prologs of Grid Engine give the mask
ALL_NAMES = environment.grant_variable_names(EXTRA_MASK_NAMES)
LAUNCHER_MARKER = (
    b"GPULOCK_LAUNCHER=1"  # in the environment of a shepherd that shepherd_cmd started
)


def main(argv: list[str], environ: "Mapping[str, str]", config: str) -> int:
    """Run the prolog; return the exit code."""
    call = hook.SgeHookCall(argv, environ)
    run, who = HookRun(call.tried), Owner(job_id=call.job, task_id=call.array_task)
    grant = run.run(config, lambda node: claim_sge_job(node, call, who, run.deadline), who)
    told = run.refusal
    if told is None:
        run.log(format_grant(call.who, grant, run.seconds()))
        if not call.site:
            return hook.DONE
        from gpulock.sge import site_hook

        told = site_hook.become_site_prolog(call, environ)
        if told.kind == UNKNOWN and run.settings is not None:
            count_unknown_refusal(Node(run.settings), told, who, run.deadline)
    if call.limited:
        told = hook.blame_job_limits(told)
    run.log(told.sentence(call.who), error=True)
    if run.settings is not None:
        sentence = told.sentence(call.who)
        events.note_event(run.settings.lock_dir, events.REFUSED, call.job, sentence)
    return hook.sge_hook_exit_code(told, run.settings)


def claim_sge_job(
    node: Node, call: hook.SgeHookCall, who: Owner, deadline: Deadline
) -> "Grant | None":
    """Claim and tell the job; return the grant, None for a job without GPUs; raise Refusal.

    `who` is whose refusal counts towards a broken node; the user is filled in.
    """
    try:
        found = hook.find_spool(node, call)
        who.user = found.need("job_owner")
        kinds, job = request.read_sge_job_gpus(found, node.settings)
    except Refusal as refusal:
        # An unknown Grid Engine makes every job wait, and stops no queue: doctor tells.
        if refusal.kind == UNKNOWN and not isinstance(refusal.__cause__, LayoutError):
            who.user = who.user or f"job {call.job}"
            count_unknown_refusal(node, refusal, who, deadline)
        raise
    check_host_count(node, found, job if kinds or job.granted else None)
    check_isolation(node.settings, found)
    if not kinds:
        for name in request.list_unknown_gpu_requests(job):
            line = f"{call.who}: asks for {name}, which is not in SGE_COMPLEXES, and gets no GPU"
            log_hook_line(node.settings, f"gpulock: {line}; see gpulock doctor", error=True)
        if node.settings.isolation != "off":
            isolate_sge_job(node, found, None)
        if node.settings.hide_unrequested:
            write_sge_variables(found, None, node.settings, "")
        return None
    binds = environment.driver_binds(node.settings) if node.settings.driver_dir else ""
    template = hook.make_sge_owner(node, found, job.uid)
    want = make_sge_claim(node.settings, found, job, kinds)
    grant = claim_devices(node, template, want, lambda: hook.make_sge_judge(node), deadline)
    who.token = grant.owner.token
    complete_sge_claim(node, found, grant, grant.owner, binds, deadline)
    return grant


def make_sge_claim(
    settings: Settings,
    found: Spool,
    job: SgeJob,
    kinds: tuple[tuple[str, int], ...],
    join: bool = False,
) -> ClaimRequest:
    """Return what to claim; raise Refusal. Of ids that qmaster chose (RSMAP) kind is no question.

    With `join` a task shares what its job has here.
    """
    want = ClaimRequest(
        sum([count for _, count in kinds]),
        request.wanted_devices(found, settings, job) if job.granted else (),
        join=join,
        check=lambda chosen: environment.grant_variables(chosen, settings, EXTRA_MASK_NAMES),
    )
    if want.wanted:
        if len(want.wanted) != want.count:
            why = "GPUs are asked for by id and by count"
            raise Refusal(INVALID_REQUEST, why, "ask for GPUs of complexes that have ids")
    elif request.SHARE in dict(kinds):
        want.share = True
    elif settings.sge_kinds:
        want.kinds = kinds
    return want


def complete_sge_claim(
    node: Node, found: Spool, grant: Grant, own: Owner, binds: str, deadline: Deadline
) -> None:
    """Record a claim, confine the job and write its variables, or undo it; raise Refusal.

    `own` is the record of the job, or of a slave task that shares its claim.
    """

    def record() -> None:
        check_shepherd_alive(node, found)
        if node.settings.isolation != "off":
            isolate_sge_job(node, found, grant)
        write_spool_record(node, found, own)
        if grant.fresh:
            grants.note_owed_line(node.settings.state_dir, node.store, grant.owner)

    complete_claim(
        node,
        grant,
        deadline,
        record,
        lambda: write_sge_variables(found, grant, node.settings, binds),
        lambda: undo_sge_claim(node, found, grant, deadline),
    )


def check_host_count(node: Node, found: Spool, job: "SgeJob | None") -> None:
    """Raise Refusal for a parallel job whose tasks would have GPUs nobody locks, or confines.

    `job` is None without GPUs. Slave tasks have no prolog: SGE_SLAVE_TASKS or a per-job complex
    gives them theirs, and our shepherd_cmd alone confines them, also on the job's own host. It has
    started this job's shepherd where Grid Engine's configuration has it: the job's owner has no
    part in that environment.
    """
    settings = node.settings
    confined = settings.isolation != "cgroup"
    locked = job is None or settings.sge_slave_tasks
    if confined and locked:
        return
    if found.need("pe") == "none":
        return
    if not confined:
        try:
            marks = node.proc.read(found.pid, "environ").split(b"\0")
        except OSError as fault:
            why = f"the shepherd {found.pid} cannot be seen: {fault}"
            raise Refusal(UNKNOWN, why, "see gpulock doctor") from fault
        if LAUNCHER_MARKER not in marks:
            raise Refusal(
                INVALID_REQUEST,
                "a parallel job, but nothing would keep its tasks from other jobs' GPUs",
                "ask for no parallel environment, or have shepherd_cmd set (docs/grid-engine.md)",
            )
    if locked or job is None or not request.has_gpus_elsewhere(found, settings, job):
        return
    raise Refusal(
        INVALID_REQUEST,
        "GPUs on several hosts, but this site gives slave tasks none",
        "use a parallel environment of one host, or ask for SGE_SLAVE_TASKS=yes",
    )


def check_shepherd_alive(node: Node, found: Spool) -> None:
    """Raise Refusal when the shepherd died under us: nobody would run our epilog."""
    try:
        alive = node.proc.running(found.pid, found.start)
    except (OSError, ValueError):
        alive = False
    if not alive:
        raise Refusal(UNKNOWN, f"the shepherd {found.pid} died meanwhile", "nothing to do")


def check_isolation(settings: "Settings", found: Spool) -> None:
    """Raise Refusal for a job that could not be confined, and load all that confines one.

    Before the claim: a Python that cannot be read would not undo it either.
    """
    if settings.isolation != "off":
        from gpulock.isolation import bpf, job  # noqa: F401 (what confines a job loads bpf)

        job.check_systemd_scope(found.config)


def isolate_sge_job(node: Node, found: Spool, grant: "Grant | None") -> None:
    """Let the kernel keep the job to its grant, to no GPU without one; raise Refusal."""
    from gpulock.isolation import job

    devices = grant.devices if grant else []
    who = job.IsolatedJob(f"{found.job}.{found.task}", found.pid, found.start)
    job.begin_job_isolation(node, who, devices)


def write_spool_record(node: Node, found: Spool, record: Owner) -> None:
    """Put the owner record into the spool directory as well, where only root can write it.

    By it `chain` believes the job's variables, and the epilog that there was a grant. Raises
    Refusal.
    """
    data = owner.encode_owner(record).encode("utf-8")
    try:
        atomic.replace_file(spool.RECORD, data, 0o644, found.fd)
    except OSError as fault:
        raise Refusal(
            os_error_kind(fault),
            f"the job's spool directory: {fault}",
            "look at execd's file system",
        ) from fault


def write_sge_variables(
    found: Spool, grant: "Grant | None", settings: Settings, binds: str
) -> None:
    """Write the job's variables."""
    devices = grant.devices if grant else []
    pairs = environment.grant_variables(devices, settings, EXTRA_MASK_NAMES)
    environment_file.write_sge_env_file(found, pairs, ALL_NAMES, binds, settings.mps_dir)


def undo_sge_claim(node: Node, found: Spool, grant: Grant, deadline: Deadline) -> None:
    """Take back a claim whose job was not told, but for one that a task shares."""
    if not grant.fresh:
        return
    try:
        os.unlink(spool.RECORD, dir_fd=found.fd)  # by it the site's hook believes the mask
    except OSError:
        pass
    undo_claim(node, grant, hook.make_sge_observer(node), deadline)
