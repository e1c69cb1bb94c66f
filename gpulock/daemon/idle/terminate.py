# SPDX-License-Identifier: Apache-2.0
"""End a job that idles by scancel, by qdel, or by a signal to its process.

Warm, used only where IDLE_KILL is set. The locks are not touched: they go when the job is gone,
as they do for every other job.
"""

from __future__ import annotations

import os
import signal

from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.node.context import Node
from gpulock.sge import qstat, spool
from gpulock.slurm.scontrol import SlurmctldClient, slurm_array_task_name, slurm_job_uid
from gpulock.store import atomic
from gpulock.store.owner import Owner


def terminate_idle_job(node: Node, record: Owner) -> str:
    """End the job that a claim is of; return what was done. Raises Refusal."""
    if record.scheduler == "slurm":
        return cancel_slurm_job(node, record)
    if record.scheduler == "sge":
        return delete_sge_job(node, record)
    if record.scheduler == "process":
        return terminate_claim_process(node, record)
    raise Refusal(UNKNOWN, f"cannot terminate {record.scheduler} claims", "see gpulock why")


def cancel_slurm_job(node: Node, record: Owner) -> str:
    """Cancel a Slurm job by the name that means this one task (facts/slurm.md, array tasks)."""
    control = SlurmctldClient(node.settings)
    found = control.job(record.job_id)
    if (
        found is None
        or slurm_job_uid(found) != record.uid
        or found["Restarts"] != str(record.restart)
    ):
        raise Refusal(UNKNOWN, "slurmctld knows another job of that id", "see squeue")
    name = slurm_array_task_name(found)
    if not control.do("scancel", name):
        raise Refusal(UNKNOWN, f"scancel {name} failed", "is slurmctld up?")
    return f"cancelled (scancel {name})"


def delete_sge_job(node: Node, record: Owner) -> str:
    """Delete a Grid Engine job, of an array the one task."""
    settings = node.settings
    path = f"{record.spool_dir}/config"
    try:
        config = spool.parse_shepherd_config(atomic.read_text(path, spool.CONFIG_LIMIT))
    except OSError as fault:
        raise Refusal(UNKNOWN, f"{path}: {fault.strerror}", "is the job over?") from fault
    if config.get("job_id") != [record.job_id]:
        raise Refusal(UNKNOWN, f"{path} is of another job", "see qstat")
    words = [record.job_id]
    if config.get("ja_task_id", ["0"])[0] != "0":
        words += ["-t", record.task_id]
    qdel = SchedulerProgram(
        qstat.find_sge_binary(settings, "qdel"),
        qstat.sge_client_environment(settings),
        "is qmaster up?",
    )
    qdel.output(words, Deadline(settings.sge_qstat_timeout))
    return f"deleted (qdel {' '.join(words)})"


def terminate_claim_process(node: Node, record: Owner) -> str:
    """Send SIGTERM to the process that holds the claim, and to no other that has its number."""
    fd = -1
    try:
        fd = os.pidfd_open(record.pid)
        if not node.proc.running(record.pid, record.start):
            raise ProcessLookupError
        signal.pidfd_send_signal(fd, signal.SIGTERM)
    except (OSError, ValueError) as fault:
        raise Refusal(UNKNOWN, f"process {record.pid}: {fault}", "see gpulock why") from fault
    finally:
        if fd >= 0:
            os.close(fd)
    return f"told to end (SIGTERM to {record.pid})"
