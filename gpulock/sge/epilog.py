# SPDX-License-Identifier: Apache-2.0
"""The epilog of Grid Engine: give back what this very run of the job holds.

Hot. It always exits 0: anything else would run a finished job again (facts/grid-engine.md). What it
cannot free is left to the next claim and the reaper.
"""

from gpulock.alloc.release import ReleaseResult, release_locks
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.hooks.common import (
    log_hook_line,
    observer_judge,
    read_hook_settings,
    unexpected_refusal,
)
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.sge import hook
from gpulock.sge.spool import Spool
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def main(argv: list[str], environ: "Mapping[str, str]", config: str) -> int:
    """Run the epilog; return 0."""
    call = hook.SgeHookCall(argv, environ)
    begun = clock_boottime()
    settings: Settings | None = None
    try:
        settings = read_hook_settings(config)
        released = release_sge_job(Node(settings), call, Deadline(hook.DEADLINE))
    except Refusal as refusal:
        log_hook_line(settings, refusal.sentence(f"epilog of {call.who}"), error=True)
    except Exception as fault:  # the one broad handler: the job is over, whatever it is
        sentence = unexpected_refusal(fault).sentence(f"epilog of {call.who}")
        log_hook_line(settings, sentence, error=True)
    else:
        for line, error in format_sge_release(call, released, clock_boottime() - begun):
            log_hook_line(settings, line, error)
        if settings.report_at_end or settings.report_dir:
            print_sge_report(settings, released)
    return hook.DONE


def print_sge_report(settings: Settings, released: ReleaseResult) -> None:
    """Have the report printed: our stdout is the job's output file (docs/facts/grid-engine.md)."""
    from gpulock.hooks import report_hook

    try:
        report_hook.start_job_report(settings, released.claims, wait=True)
    except OSError as fault:
        log_hook_line(settings, f"no report: {fault}", error=False)


def release_sge_job(node: Node, call: hook.SgeHookCall, deadline: Deadline) -> ReleaseResult:
    """Release the locks of this run; raise Refusal."""
    found = hook.find_spool(node, call)
    if node.settings.leftover_processes != "off":
        clean_sge_leftovers(node, call, found, deadline)
    if node.settings.isolation == "off":
        return release_locks(
            node, SgeJobMatcher(node, found), observer_judge(node), deadline, "epilog"
        )
    from gpulock.isolation import job

    left = job.end_job_isolation(
        node, job.IsolatedJob(f"{found.job}.{found.task}", found.pid, found.start)
    )
    judge = observer_judge(node, hook.make_sge_members(node))
    released = release_locks(node, SgeJobMatcher(node, found), judge, deadline, "epilog")
    left = left or job.close_released_devices(node, deadline)
    if left:
        released.kept.append(("its isolation", left))
    return released


def clean_sge_leftovers(
    node: Node, call: hook.SgeHookCall, found: Spool, deadline: Deadline
) -> None:
    """Report or end what the job left behind; raise Refusal."""
    from gpulock.hooks.cleanup import clean_leftovers
    from gpulock.sge.remains import SgeLeftoverFinder

    for line in clean_leftovers(
        node,
        SgeJobMatcher(node, found),
        lambda: observer_judge(node),
        SgeLeftoverFinder(node),
        deadline,
    ):
        log_hook_line(node.settings, f"{call.who}: {line}", error=False)


class SgeJobMatcher:
    """Answer whether a record is of this very run: job, task, shepherd and its start time."""

    __slots__ = ("_key", "_run")

    def __init__(self, node: Node, found: Spool) -> None:
        self._key = ("sge", node.settings.sge_cell, node.name, found.job, found.array_task)
        self._run = (found.pid, found.start, node.boot_id)

    def __call__(self, record: Owner) -> bool:
        return record.key() == self._key and self._run == (
            record.pid,
            record.start,
            record.boot_id,
        )


def format_sge_release(
    call: hook.SgeHookCall, released: ReleaseResult, seconds: float
) -> list[tuple[str, bool]]:
    """Return what to tell: (line, whether it is an error)."""
    found: list[tuple[str, bool]] = []
    if released.freed:
        names = ",".join(released.freed)
        found.append((f"{call.who}: released {names} in {seconds * 1000:.1f} ms", False))
    for device, why in released.away:
        found.append((f"{call.who}: {device} is out of service: {why}", False))
    for device, why in released.spared:
        found.append((f"{call.who}: {device} stays in service, though: {why}", False))
    for device, why in released.kept:
        found.append((f"{call.who}: {device} is kept for now: {why}", False))
    return found
