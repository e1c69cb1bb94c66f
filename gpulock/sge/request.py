# SPDX-License-Identifier: Apache-2.0
"""How many GPUs of this host a Grid Engine job was granted.

Hot. execd's own spool of the job says it, and no qmaster is asked. A wrong, missing or hostile file
is a refusal, never "none".
"""

from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.node.settings import Settings
from gpulock.sge.spool import JOB_LIMIT, Spool, count_sge_job_hosts, unread_spool_refusal
from gpulock.sge.spooled_job import MOST_GPUS, LayoutError, SgeJob, parse_spooled_job
from gpulock.store import atomic

GPU = "gpu"
SHARE = "share"  # SHARE_KIND of gpulock.node.kinds, whose import would cost each job
PER_SLOT, PER_JOB = 1, 2  # CE_consumable (sge_centryL.h: CONSUMABLE_YES, CONSUMABLE_JOB)


def read_execd_job(spool: Spool, up: str = "../..") -> SgeJob:
    """Return the job from execd's spool; raise Refusal.

    `up` leads from the shepherd's directory to execd's.
    """
    digits = f"{int(spool.job):010}"  # as execd divides them among its folders
    name = f"{up}/jobs/{digits[:-8]}/{digits[-8:-4]}/{digits[-4:]}.{spool.task}"
    try:
        job = parse_spooled_job(atomic.read_file(name, JOB_LIMIT, spool.fd))
    except FileNotFoundError as fault:
        raise Refusal(UNKNOWN, "execd has no file of this job", "see gpulock doctor") from fault
    except (OSError, LayoutError) as fault:
        raise unread_spool_refusal("execd's job file", fault) from fault
    if str(job.number) != spool.job or job.owner != spool.need("job_owner"):
        raise Refusal(UNKNOWN, f"execd's job file is of job {job.number}", "see gpulock doctor")
    return job


def count_requested_gpus(asked: tuple[str, float, int], slots: int) -> int:
    """Return the GPUs of a request (name, value, consumable flag); pure; raise Refusal.

    A per-slot complex is taken once a slot.
    """
    name, value, consumable = asked
    if not value >= 0 or value > MOST_GPUS or value != int(value):
        raise Refusal(
            INVALID_REQUEST, f"-l {name}={value:g} is no number of GPUs", "ask for whole GPUs"
        )
    if consumable not in (PER_SLOT, PER_JOB):
        raise Refusal(
            UNKNOWN, f"the complex {name} is no consumable", "see gpulock doctor for the complex"
        )
    return int(value) * (slots if consumable == PER_SLOT else 1)


def count_job_kinds(spool: Spool, settings: Settings, job: SgeJob) -> tuple[tuple[str, int], ...]:
    """Return (kind, count) of what was granted on this host; raise Refusal."""
    slots = None if spool.need("pe") == "none" else spool.number("host_slots")
    return count_gpus_by_kind(job, settings, spool.need("host"), slots)


def count_gpus_by_kind(
    job: SgeJob, settings: Settings, host: str, slots: "int | None"
) -> tuple[tuple[str, int], ...]:
    """Return (kind, count) of what a job was granted on a host; pure; raise Refusal.

    The kind is empty for a complex that names none; `slots` is None without a parallel environment.
    """
    asked = [one for one in job.requests if one[0] in settings.sge_complexes]
    if job.granted is not None:
        asked = list({one[0]: one for one in asked}.values())  # of several scopes
    kinds = [settings.sge_kinds.get(name, "") for name, _, _ in asked]
    names = ", ".join([name for name, _, _ in asked])
    if len(set(kinds)) < len(kinds):
        why = f"GPUs are asked for twice ({names})"
        raise Refusal(INVALID_REQUEST, why, "use one complex of a kind")
    if slots is not None and job.granted is None and len({flag for _, _, flag in asked}) > 1:
        raise Refusal(
            INVALID_REQUEST,
            f"{names} are counted by job and by slot",
            "ask a parallel job's GPUs by slot, or all by job",
        )
    if job.granted is None:
        counts = [count_requested_gpus(one, 1 if slots is None else slots) for one in asked]
    else:
        from gpulock.sge.granted import count_granted_gpus

        counts = [count_granted_gpus(job, one[0], host) for one in asked]
    granted = [(kind, count) for kind, count in zip(kinds, counts) if count]
    if len(granted) > 1 and SHARE in dict(granted):
        why = "a share and other GPUs are asked for in one job"
        raise Refusal(INVALID_REQUEST, why, "ask for one of them")
    return tuple(granted)


def has_gpus_elsewhere(spool: Spool, settings: Settings, job: SgeJob) -> bool:
    """Return whether a parallel job has GPUs on other hosts as well; raise Refusal."""
    if job.granted is not None:
        from gpulock.sge.granted import list_other_hosts

        return bool(list_other_hosts(job, settings.sge_complexes, spool.need("host")))
    if is_per_job_request(job.requests, settings.sge_complexes):
        return False
    return count_sge_job_hosts(spool) > 1


def is_per_job_request(requests: list[tuple[str, float, int]], complexes: tuple[str, ...]) -> bool:
    """Return whether the GPUs are asked for once a job, not once a slot."""
    return any([name in complexes and flag == PER_JOB for name, _, flag in requests])


def read_sge_job_gpus(
    spool: Spool, settings: Settings
) -> tuple[tuple[tuple[str, int], ...], SgeJob]:
    """Return (kind, count) of the GPUs of this host that the job was granted, and the job."""
    job = read_execd_job(spool)
    if job.granted:
        from gpulock.sge.granted import check_host_name

        check_host_name(spool, settings, job)
    return count_job_kinds(spool, settings, job), job


def list_unknown_gpu_requests(job: SgeJob) -> list[str]:
    """Return what a job without GPUs consumes that is a count of GPUs by its name. Pure."""
    return [name for name, value, flag in job.requests if flag and value and GPU in name.lower()]
