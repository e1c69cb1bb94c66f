# SPDX-License-Identifier: Apache-2.0
"""The Prolog of Slurm: lock what the job was granted on this node, and note it for its tasks.

Hot. It exits 0 whatever becomes of the claim, because anything else drains the node: a job that
was refused finds its reason in its note, and TaskProlog stops it. Only a broken node exits 1.
"""

import time

from gpulock.alloc.claim import claim, note_unknown
from gpulock.alloc.grant import Grant
from gpulock.deadline import Deadline, boottime
from gpulock.errors import BROKEN, BUSY, UNKNOWN, Refusal
from gpulock.hooks.common import looker, settings_for, tell, unexpected
from gpulock.job import environment
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.slurm import note, request
from gpulock.slurm.call import DEADLINE, Call
from gpulock.slurm.note import Note
from gpulock.store import boot, claim_records, kv
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpulock.alloc.liveness import Judge

GO_ON, NODE_BROKEN = 0, 1
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two looks at a device that is held


def main(environ: "Mapping[str, str]", config: str) -> int:
    """Run the Prolog; return the exit code."""
    begun = boottime()
    settings: Settings | None = None
    call: Call | None = None
    try:
        call = Call(environ)
        settings = settings_for(config)
        grant = serve(Node(settings), call, Deadline(DEADLINE))
    except Refusal as refusal:
        told = refusal
    except Exception as fault:  # the one broad handler: whatever it is, the job does not start
        told = unexpected(fault)
    else:
        tell(settings, granted_line(call, grant, boottime() - begun), error=False)
        return GO_ON
    return refused(call, settings, told)


def serve(node: Node, call: Call, deadline: Deadline) -> Grant | None:
    """Claim and write the note; return the grant, None for a job without GPUs; raise Refusal."""
    settings = node.settings
    try:
        count = request.count(call, settings)
    except Refusal as refusal:
        if refusal.kind == UNKNOWN and not is_silence(refusal):
            note_unknown(node, refusal, Owner(job_id=call.job, user=call.user), deadline)
        raise
    own = Note(call.slurmd, call.job, call.uid, call.restart)
    if count == 0:
        try:
            write(node, own)
        except Refusal as fault:  # no node is drained for a job without GPUs
            tell(settings, fault.sentence(call.who), error=False)
        return None
    if settings.isolation != "off":
        from gpulock.isolation import job

        job.check_without_group(settings)
    own.binds = environment.driver_binds(settings)
    own.positions = call.positions() if request.is_counted_by_position(settings) else []
    grant = insist(node, call, own, count, deadline)
    try:
        keep(settings, call, grant)
        own.token, own.devices = grant.owner.token, in_order(node, own.positions, grant)
        write(node, own)
        node.map_jobs(grant.owner, grant.devices)
    except BaseException as fault:  # whatever it is, the job does not start: it keeps nothing
        undo(node, grant, deadline)
        if isinstance(fault, OSError):
            raise Refusal(BROKEN, f"STATE_DIR: {fault}", "look at STATE_DIR") from fault
        raise
    return grant


def keep(settings: Settings, call: Call, grant: Grant) -> None:
    """Note the claim for adoption and history; raise OSError, but not for a full disk."""
    path, fault = claim_records.keep_or_mark(settings.state_dir, grant.owner)
    if fault:
        tell(settings, f"{call.who}: {fault}", error=True)
    else:
        claim_records.owe(settings, grant.owner, path)


def is_silence(refusal: Refusal) -> bool:
    """Return whether slurmctld was asked and said nothing, which is no fault of this node."""
    return type(refusal).__name__ == "SilentError"  # its module is loaded only where it is asked


def insist(node: Node, call: Call, own: Note, count: int, deadline: Deadline) -> Grant:
    """Claim, and wait for a device that is still held: Slurm says that it is free."""
    wait = deadline.sooner(node.settings.slurm_wait)
    template = call.template(node)
    template.positions = ",".join(own.positions)
    pause = FIRST_PAUSE
    while True:
        wanted = request.wanted(call, node)
        try:
            return claim(
                node,
                template,
                count,
                lambda: judge(node),
                deadline,
                wanted,
                check=lambda chosen: environment.variables(chosen, node.settings),
            )
        except Refusal as refusal:
            if refusal.kind != BUSY or wait.left() <= 0:
                raise
        time.sleep(min(pause, max(wait.left(), 0.0)))
        pause = min(2 * pause, LONGEST_PAUSE)


def judge(node: Node) -> "Judge":
    """Return a judge for a prolog: of Slurm jobs only what their own epilog gave up."""
    from gpulock.alloc.liveness import Judge, Scan, process_verdict
    from gpulock.slurm.steps import Steps
    from gpulock.slurm.verdict import hook_verdict

    steps = Steps(node.settings)
    rules = {"slurm": hook_verdict, "process": process_verdict}
    members = {"slurm": steps.left_or_step}
    return Judge(node.boot_id, node.name, Scan(node.proc), rules, members, steps.attach)


def in_order(node: Node, positions: list[str], grant: Grant) -> list[Device]:
    """Return the devices of a grant in the order of Slurm's positions, where it chose them."""
    if not request.is_picked_by_slurm(node.settings):
        return grant.devices
    from gpulock.slurm.gres_map import devices_at

    return devices_at(node.settings.state_dir, positions, grant.devices)


def write(node: Node, own: Note) -> None:
    """Write the job's note; raise Refusal(BROKEN)."""
    try:
        boot.ensure(node.store)
        note.write(node.store, own)
    except (OSError, kv.MalformedError) as fault:
        raise Refusal(BROKEN, f"the note of job {own.job}: {fault}", "look at LOCK_DIR") from fault


def undo(node: Node, grant: Grant, deadline: Deadline) -> None:
    """Take back a claim whose job was not told; what fails is left to epilog and reaper."""
    from gpulock.alloc.release import release

    token = grant.owner.token
    try:
        release(node, lambda o: o.token == token, looker(node), deadline, "claim undone")
    except (Refusal, OSError):
        return


def refused(call: Call | None, settings: Settings | None, refusal: Refusal) -> int:
    """Tell everybody who must know, and return the exit code."""
    sentence = refusal.sentence(call.who if call else "a job")
    if call is None:
        tell(settings, sentence, error=True)
        return NODE_BROKEN  # nothing can be told to the job: it must not start
    from gpulock.slurm import refuse

    if settings is None:
        refuse.drain(call, Settings({}), sentence)
        tell(settings, sentence, error=True)
        return NODE_BROKEN
    if refuse.stops_node(refusal, settings):
        refuse.drain(call, settings, sentence)
        tell(settings, sentence, error=True)
        return NODE_BROKEN
    own = Note(call.slurmd, call.job, call.uid, call.restart)
    own.refused, own.code = sentence, refuse.exit_of_task(refusal, settings)
    try:
        node = Node(settings)
        if note.is_overtaken(node.store, own):
            tell(settings, f"{sentence}; a later run of it is here", error=True)
            return GO_ON  # of a slurmd that was killed: nobody waits for us
        write(node, own)
    except Refusal as fault:
        tell(settings, sentence, error=True)
        tell(settings, fault.sentence(call.who), error=True)
        return NODE_BROKEN
    done = refuse.whole_job(call, settings, refusal, sentence)
    tell(settings, f"{sentence}; {done}" if done else sentence, error=True)
    return GO_ON


def granted_line(call: Call, grant: Grant | None, seconds: float) -> str:
    """Return the one line of a job that may start."""
    if grant is None:
        return f"{call.who}: no GPU asked for, {seconds * 1000:.1f} ms"
    names = ",".join([f"{d.index}={d.id}" for d in grant.devices])
    return (
        f"{call.who} of {call.user}: granted {names} in {seconds * 1000:.1f} ms, "
        f"{grant.waited * 1000:.1f} ms at the gate"
    )
