# SPDX-License-Identifier: Apache-2.0
"""Slave tasks (`qrsh -inherit`) of a parallel job: Grid Engine runs no prolog for them.

Hot. `shepherd_cmd` is gpulock's launcher: in a task's directory it runs this program and then
becomes the real shepherd, with the same pid and start time; these anchor the lock. The first task
of a job on a host claims for all of the job's slots there; later ones share that grant. Nothing
runs at a task's end: the next claim, the reaper or the job's epilog frees. A task that may not
have its GPUs gets an empty mask and GPULOCK_REFUSED, which the starter method reports.
"""

import os

from gpulock.alloc.claim import claim
from gpulock.alloc.grant import Grant
from gpulock.deadline import Deadline, boottime
from gpulock.errors import UNKNOWN, Refusal
from gpulock.hooks.common import tell, unexpected
from gpulock.job import environment
from gpulock.node.context import Node
from gpulock.node.settings import Settings, load
from gpulock.sge import envfile, hook, request, spool
from gpulock.sge.prolog import ALSO, RECORD, give, granted_line, isolate, keep_record, undo
from gpulock.store import claim_records

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

UP = "../../.."  # active_jobs/J.T/N.host: one deeper than a job
REFUSED = "GPULOCK_REFUSED"


def main(argv: list[str], environ: "Mapping[str, str]", config: str) -> int:
    """Claim for the task whose shepherd-to-be is argv[1]; return 0 when it may start."""
    call = hook.Call(argv, environ)
    begun = boottime()
    settings: Settings | None = None
    found: spool.Spool | None = None
    try:
        os.setresuid(0, 0, 0)  # execd runs shepherds with euid of the admin user, ruid 0
        settings = load(config)
        node = Node(settings)
        found = spool.above(node.proc, call.shepherd)
        call.who = f"job {found.job}.{found.task}, task {os.path.basename(found.path)}"
        deadline = Deadline(hook.DEADLINE)
        grant = serve(node, found, deadline) if settings.sge_slave_tasks else None
        if grant is None:
            isolate(node, found, None, deadline)
    except Refusal as refusal:
        told = refusal
    except Exception as fault:  # the one broad handler: the task gets no GPU
        told = unexpected(fault)
    else:
        tell(settings, granted_line(call, grant, boottime() - begun), error=False)
        return hook.DONE
    tell(settings, told.sentence(call.who), error=False)
    return mask(found, settings, told.sentence(call.who))


def serve(node: Node, found: spool.Spool, deadline: Deadline) -> Grant | None:
    """Give the task the GPUs of its job on this host; raise Refusal."""
    job = request.spooled(found, UP)
    if job is None:
        raise Refusal(UNKNOWN, "execd has no file of this job", "see gpulock doctor")
    home = on_master_host(found)
    count = request.count(job.requests, node.settings.sge_complexes, request.slots_here(found))
    if not home and request.per_job(job.requests, node.settings.sge_complexes):
        count = 0  # a per-job complex is debited on the master host alone
    if count == 0:
        if node.settings.hide_unrequested:
            give(found, None, node.settings, "")
        return None
    binds = environment.driver_binds(node.settings)
    template = hook.template(node, found, job.uid)
    if home and not holds(node, template.key()):
        raise Refusal(UNKNOWN, "the job holds no GPU on its master host", "see gpulock why")
    grant = claim(node, template, count, lambda: hook.judge(node), deadline, join=True)
    own = grant.owner.copy(pid=found.pid, start=found.start, add_grp_id=template.add_grp_id)
    try:
        isolate(node, found, grant, deadline)
        keep_record(found, own)
        if grant.fresh:
            claim_records.owe(node.settings, grant.owner, RECORD, found.fd)
        give(found, grant, node.settings, binds)
        node.map_jobs(grant.owner, grant.devices)
    except BaseException:  # whatever it is, the task has no GPU: it keeps nothing of its own
        undo(node, grant, deadline)
        raise
    return grant


def on_master_host(found: spool.Spool) -> bool:
    """Return whether the job's own shepherd is on this host: its directory is above the task's."""
    try:
        os.stat("../config", dir_fd=found.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def holds(node: Node, key: tuple[str, str, str, str, str]) -> bool:
    """Return whether a job holds a lock here: on its master host only its prolog claims."""
    if not node.store.exists():
        return False
    return any([lock.owner and lock.owner.key() == key for lock in node.store.all().values()])


def mask(found: spool.Spool | None, settings: Settings | None, sentence: str) -> int:
    """Let the task start without a GPU and with the reason; return 1 when even that fails."""
    if found is None or settings is None:
        return 1
    try:
        isolate(Node(settings), found, None, Deadline(hook.DEADLINE))
        pairs = [*environment.variables([], settings, ALSO), (REFUSED, sentence)]
        drop = environment.drop_names(ALSO) | {REFUSED, RECORD}
        envfile.write(found, pairs, drop, "")
    except Refusal:
        return 1
    return 0
