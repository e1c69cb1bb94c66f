# SPDX-License-Identifier: Apache-2.0
"""The epilog of Grid Engine: give back what this very run of the job holds.

Hot. gpulock's part never changes the exit code: anything but 0 would run a finished job again
(facts/grid-engine.md). The site's own epilog comes first, and its code alone counts. What cannot be
freed is left to the next claim and the reaper.
"""

import os
import stat

from gpulock.alloc.release import ReleaseResult
from gpulock.hooks.frame import HookRun, log_hook_line, release_job
from gpulock.node.context import Node
from gpulock.sge import hook
from gpulock.sge.members import make_sge_observer
from gpulock.sge.spool import RECORD, Spool
from gpulock.store import atomic
from gpulock.store.owner import Owner

EXIT_STATUS, JOB_PID = "exit_status", "job_pid"  # files of the shepherd's
EXIT_STATUS_LIMIT = 1 << 16  # bytes
APPLICATION_ERROR = "30"  # the job is in error (common/execution_states.h of 8.1.9)
# What a job's end can mean to itself: done, again, no output file, shell, folder or group.
OWN_STATES = ("0", "25", "26", "27", "28", "30", "38")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def main(argv: list[str], environ: "Mapping[str, str]", config: str) -> int:
    """Run the epilog; return 0, or what the site's own ended with."""
    call = hook.SgeHookCall(argv, environ)
    code = hook.DONE
    if call.site:
        from gpulock.sge import site_hook

        code = site_hook.run_site_epilog(call, environ)
    run = HookRun(call.tried)
    run.run(config, lambda node: release_sge_job(node, call, code, run))
    if run.refusal is not None:
        run.log(run.refusal.sentence(f"epilog of {call.who}"), error=True)
    return code


def release_sge_job(
    node: Node, call: hook.SgeHookCall, site_code: int, run: HookRun
) -> ReleaseResult:
    """Release the locks of this run; raise Refusal. An epilog of the site's that failed says so."""
    job_spool = hook.find_spool(node, call)
    if site_code == hook.DONE:
        try:
            secure_exit_status(job_spool)
        except OSError as fault:  # the locks matter more
            log_hook_line(node.settings, f"{call.who}: exit_status: {fault}", error=True)

    def free() -> str:
        from gpulock.isolation import job

        isolated = job.IsolatedJob(
            f"{job_spool.job}.{job_spool.task}", job_spool.pid, job_spool.start
        )
        return job.end_job_isolation(node, f"{isolated.label}-", isolated)

    ours = match_sge_run(node, job_spool)
    released = release_job(node, run, call.who, ours, lambda: make_sge_observer(node), free)
    if not released.known and os.access(RECORD, os.F_OK, dir_fd=job_spool.fd):
        line = f"{call.who}: it was granted GPUs, and no lock here is known as its own: gpulock why"
        log_hook_line(node.settings, f"{line} {job_spool.job}", error=True, to_job=False)
    return released


def secure_exit_status(job_spool: Spool) -> None:
    """Take `exit_status` from the job's owner, with nothing in it that stops a queue.

    The shepherd gives the file to the owner, and execd believes the first number in it: a job that
    writes 7 there puts every queue of the host in error (facts/grid-engine.md, exit_status).
    """
    try:
        # where the job never ran the number is the shepherd's, for a prolog that failed
        os.stat(JOB_PID, dir_fd=job_spool.fd, follow_symlinks=False)
        mode = os.stat(EXIT_STATUS, dir_fd=job_spool.fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    try:
        words = atomic.read_text(EXIT_STATUS, EXIT_STATUS_LIMIT, job_spool.fd).split(None, 1) or [
            "0"
        ]
    except (OSError, ValueError):
        words = ["unreadable"]
    status = words[0] if words[0] in OWN_STATES else APPLICATION_ERROR
    owner = (job_spool.uid, -1) if os.geteuid() == 0 else None
    atomic.replace_file(
        EXIT_STATUS, f"{status}\n".encode(), stat.S_IMODE(mode), job_spool.fd, owner
    )


def match_sge_run(node: Node, job_spool: Spool) -> "Callable[[Owner], bool]":
    """Return what tells a record of this very run: job, task, shepherd and its start time."""
    key = ("sge", node.settings.sge_cell, "", job_spool.job, job_spool.array_task)
    run = (job_spool.pid, job_spool.start, node.boot_id)
    return lambda one: one.key() == key and run == (one.pid, one.start, one.boot_id)
