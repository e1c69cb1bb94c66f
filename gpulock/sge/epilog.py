# SPDX-License-Identifier: Apache-2.0
"""The epilog of Grid Engine: give back what this very run of the job holds.

Hot. It always exits 0: anything else would run a finished job again (reference sge 4). What it
cannot free is left to the next claim and the reaper.
"""

from gpulock.alloc.release import Released, release
from gpulock.deadline import Deadline, boottime
from gpulock.errors import Refusal
from gpulock.hooks.common import looker, settings_for, tell, unexpected
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
    call = hook.Call(argv, environ)
    begun = boottime()
    settings: Settings | None = None
    try:
        settings = settings_for(config)
        released = serve(Node(settings), call, Deadline(hook.DEADLINE))
    except Refusal as refusal:
        tell(settings, refusal.sentence(f"epilog of {call.who}"), error=True)
    except Exception as fault:  # the one broad handler: the job is over, whatever it is
        sentence = unexpected(fault).sentence(f"epilog of {call.who}")
        tell(settings, sentence, error=True)
    else:
        for line, error in lines(call, released, boottime() - begun):
            tell(settings, line, error)
        if settings.report_at_end or settings.report_dir:
            report(settings, released)
    return hook.DONE


def report(settings: Settings, released: Released) -> None:
    """Have the report printed: our standard output is the job's output file (reference sge 1)."""
    from gpulock.hooks import report_hook

    try:
        report_hook.report(settings, released.claims, wait=True)
    except OSError as fault:
        tell(settings, f"no report: {fault}", error=False)


def serve(node: Node, call: hook.Call, deadline: Deadline) -> Released:
    """Release the locks of this run; raise Refusal."""
    found = hook.find_spool(node, call)
    if node.settings.clean != "off":
        tidy(node, call, found, deadline)
    if node.settings.isolation == "off":
        return release(node, ours(node, found), looker(node), deadline, "epilog")
    from gpulock.isolation import job

    left = job.end(node, job.Who(f"{found.job}.{found.task}", found.pid, found.start))
    judge = looker(node, hook.members(node))
    released = release(node, ours(node, found), judge, deadline, "epilog")
    left = left or job.ended(node, deadline)
    if left:
        released.kept.append(("its isolation", left))
    return released


def tidy(node: Node, call: hook.Call, found: Spool, deadline: Deadline) -> None:
    """Report or end what the job left behind; raise Refusal."""
    from gpulock.hooks.cleanup import clean
    from gpulock.sge.remains import Remains

    for line in clean(node, ours(node, found), lambda: looker(node), Remains(node), deadline):
        tell(node.settings, f"{call.who}: {line}", error=False)


class ours:
    """Answer whether a record is of this very run: job, task, shepherd and its start time."""

    __slots__ = ("_key", "_run")

    def __init__(self, node: Node, found: Spool) -> None:
        self._key = ("sge", node.settings.sge_cell, node.name, found.job, found.task)
        self._run = (found.pid, found.start, node.boot_id)

    def __call__(self, record: Owner) -> bool:
        return record.key() == self._key and self._run == (
            record.pid,
            record.start,
            record.boot_id,
        )


def lines(call: hook.Call, released: Released, seconds: float) -> list[tuple[str, bool]]:
    """Return what to tell: (line, whether it is an error)."""
    found: list[tuple[str, bool]] = []
    if released.freed:
        names = ",".join(released.freed)
        found.append((f"{call.who}: released {names} in {seconds * 1000:.1f} ms", False))
    for device, why in released.away:
        found.append((f"{call.who}: {device} is out of service: {why}", False))
    for device, why in released.kept:
        found.append((f"{call.who}: {device} is kept for now: {why}", False))
    return found
