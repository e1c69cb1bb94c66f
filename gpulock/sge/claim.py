# SPDX-License-Identifier: Apache-2.0
"""A claim of Grid Engine, for the prolog of a job and for slave tasks: its record, its tail, undo.

Hot.
"""

import os

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.deadline import Deadline
from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal, os_error_kind
from gpulock.hooks.frame import complete_claim, undo_claim
from gpulock.job import environment
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.sge import environment_file, request, spool
from gpulock.sge.spool import Spool
from gpulock.sge.spooled_job import SgeJob
from gpulock.store import atomic, grants, owner
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.liveness import Judge

EXTRA_MASK_NAMES = ("SGE_GPU",)  # the name that other prologs of Grid Engine give the mask
ALL_NAMES = environment.grant_variable_names(EXTRA_MASK_NAMES)


def make_sge_owner(node: Node, job_spool: Spool, uid: int) -> Owner:
    """Return the record of a job, all but the devices; raise Refusal.

    Where execd has systemd start the job (facts/grid-engine.md), `config` may name no group, or one
    that is on no process: a lock would go while the job lives.
    """
    group = job_spool.number("add_grp_id")
    outside = job_spool.config.get("use_systemd") == ["yes"]  # Some Grid Engine
    if outside or (job_spool.config.get("enable_systemd") == ["1"] and not group):
        why = "execd has systemd start the job, so no process can be known as the job's"
        do = "take USE_CGROUPS=systemd out of" if outside else "set ENABLE_ADDGRP_KILL=true in"
        raise Refusal(INVALID_REQUEST, why, f"{do} execd_params")
    return Owner(
        scheduler="sge",
        cluster=node.settings.sge_cell,
        node=node.name,
        job_id=job_spool.job,
        task_id=job_spool.array_task,
        pid=job_spool.pid,
        start=job_spool.start,
        user=job_spool.need("job_owner"),
        uid=uid,
        queue=job_spool.need("queue"),
        spool_dir=job_spool.path,
        add_grp_id=0 if node.settings.simulation else group,
        sid=node.proc.stat(job_spool.pid).session if node.settings.simulation else 0,
        boot_id=node.boot_id,
        namespaces=node.proc.namespaces(""),
    )


def make_sge_claim(
    settings: Settings,
    job_spool: Spool,
    job: SgeJob,
    kinds: tuple[tuple[str, int], ...],
    join: bool = False,
) -> ClaimRequest:
    """Return what to claim; raise Refusal.

    Where qmaster chose ids (RSMAP) the kinds do not count. With `join` a task shares what its job
    has here, or else claims.
    """
    wanted: tuple[str, ...] = ()
    if job.granted:
        from gpulock.sge.granted import wanted_devices

        wanted = wanted_devices(job_spool, settings, job)
    want = ClaimRequest(
        sum([count for _, count in kinds]),
        wanted,
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


def claim_sge_devices(
    node: Node,
    job_spool: Spool,
    job: SgeJob,
    kinds: tuple[tuple[str, int], ...],
    deadline: Deadline,
    claimant: "Owner | None" = None,
) -> Grant:
    """Claim what a job was granted here, confine it and tell it; raise Refusal.

    A prolog's `claimant` gets the claim's token: a refusal from then on undoes a grant. Without it
    a slave task shares what its job holds here, or else claims for the job.
    """
    binds = environment.driver_binds(node.settings) if node.settings.driver_dir else ""
    template = make_sge_owner(node, job_spool, job.uid)
    want = make_sge_claim(node.settings, job_spool, job, kinds, join=claimant is None)

    def judge() -> "Judge":
        from gpulock.sge.verdict import make_sge_judge

        return make_sge_judge(node)

    grant = claim_devices(node, template, want, judge, deadline)
    own = grant.owner
    if claimant is None:
        own = own.copy(pid=job_spool.pid, start=job_spool.start, add_grp_id=template.add_grp_id)
    else:
        claimant.token = own.token

    def record() -> None:
        check_shepherd_alive(node, job_spool)
        isolate_sge_job(node, job_spool, grant.devices)
        write_spool_record(job_spool, own)
        if grant.fresh:
            grants.note_owed_line(node.settings.state_dir, node.store, grant.owner)

    complete_claim(
        node,
        grant,
        deadline,
        record,
        lambda: write_sge_variables(job_spool, grant.devices, node.settings, binds),
        lambda: undo_sge_claim(node, job_spool, grant, deadline),
    )
    return grant


def mask_sge_job(node: Node, job_spool: Spool) -> None:
    """Keep a job without GPUs from all of them; raise Refusal."""
    isolate_sge_job(node, job_spool, [])
    if node.settings.hide_unrequested:
        write_sge_variables(job_spool, [], node.settings, "")


def check_shepherd_alive(node: Node, job_spool: Spool) -> None:
    """Raise Refusal when the shepherd died under us: nobody would run our epilog."""
    try:
        alive = node.proc.running(job_spool.pid, job_spool.start)
    except (OSError, ValueError):
        alive = False
    if not alive:
        raise Refusal(UNKNOWN, f"the shepherd {job_spool.pid} died meanwhile", "nothing to do")


def check_isolation(settings: "Settings", job_spool: Spool) -> None:
    """Raise Refusal for a job that could not be confined, and load all that confines one.

    Before the claim: where these modules cannot be loaded, those that undo a claim might not be.
    """
    if settings.isolation != "off":
        from gpulock.isolation import bpf, job  # noqa: F401 (what confines a job loads bpf)

        job.check_systemd_scope(job_spool.config)


def isolate_sge_job(node: Node, job_spool: Spool, devices: list[Device]) -> None:
    """Let the kernel keep the job to what it was granted; raise Refusal."""
    if node.settings.isolation == "off":
        return
    from gpulock.isolation import job

    isolated = job.IsolatedJob(f"{job_spool.job}.{job_spool.task}", job_spool.pid, job_spool.start)
    job.begin_job_isolation(node, isolated, devices)


def write_spool_record(job_spool: Spool, record: Owner) -> None:
    """Put the owner record into the spool directory as well, where only root can write it.

    By it `site_hook` believes the job's mask, and the epilog that there was a grant. Raises
    Refusal.
    """
    data = owner.encode_owner(record).encode("utf-8")
    try:
        atomic.replace_file(spool.RECORD, data, 0o644, job_spool.fd)
    except OSError as fault:
        raise Refusal(
            os_error_kind(fault),
            f"the job's spool directory: {fault}",
            "look at execd's file system",
        ) from fault


def write_sge_variables(
    job_spool: Spool, devices: list[Device], settings: Settings, binds: str
) -> None:
    """Write the job's variables."""
    pairs = environment.grant_variables(devices, settings, EXTRA_MASK_NAMES)
    environment_file.write_sge_env_file(job_spool, pairs, ALL_NAMES, binds, settings.mps_dir)


def undo_sge_claim(node: Node, job_spool: Spool, grant: Grant, deadline: Deadline) -> None:
    """Take back a claim that was made just now, whose job was not told."""
    if not grant.fresh:
        return
    try:
        os.unlink(spool.RECORD, dir_fd=job_spool.fd)  # by it `site_hook` believes the mask
    except OSError:
        pass
    from gpulock.sge.members import make_sge_observer

    undo_claim(node, grant, make_sge_observer(node), deadline)
