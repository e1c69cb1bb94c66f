# SPDX-License-Identifier: Apache-2.0
"""The Prolog of Slurm: lock what the job was granted on this node, and note it for its tasks.

Hot. It exits 0 whatever becomes of the claim, because anything else drains the node: a job that
was refused finds its reason in its note, and TaskProlog stops it. Only a broken node exits 1.
"""

import os
import time

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices, count_unknown_refusal
from gpulock.deadline import Deadline
from gpulock.errors import (
    BROKEN,
    BUSY,
    LockTimeout,
    Refusal,
    os_error_kind,
)
from gpulock.hooks.frame import (
    HookRun,
    complete_claim,
    format_grant,
    log_hook_line,
    observer_judge,
    undo_claim,
)
from gpulock.job import environment
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.slurm import gres_map, note, request
from gpulock.slurm.call import SlurmHookCall
from gpulock.slurm.note import TaskNote
from gpulock.store import grants, kv
from gpulock.store.gate import Gate
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpulock.alloc.liveness import Judge, LivenessRule

GO_ON, NODE_BROKEN = 0, 1
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two looks at a device that is held


def main(environ: "Mapping[str, str]", config: str) -> int:
    """Run the Prolog; return the exit code."""
    run = HookRun(trial="SLURM_JOB_ID" not in environ)
    call = run.attempt(lambda: SlurmHookCall(environ))
    if call is None:
        return report_slurm_refusal(None, run)
    claimant = Owner(job_id=call.job, user=call.user)
    grant = run.run(
        config, lambda node: claim_slurm_job(node, call, claimant, run.deadline), claimant
    )
    if run.refusal is not None:
        return report_slurm_refusal(call, run)
    run.log(format_grant(call.who, grant, run.seconds()))
    return GO_ON


def claim_slurm_job(
    node: Node, call: SlurmHookCall, claimant: Owner, deadline: Deadline
) -> "Grant | None":
    """Claim and write the note; return the grant, None for a job without GPUs; raise Refusal.

    `claimant` is whose refusal counts towards a broken node.
    """
    settings = node.settings
    share = request.asks_for_share(call, settings)
    own = TaskNote(call.slurmd, call.job, call.uid, call.restart)
    try:
        positions = call.positions()
    except Refusal as refusal:
        count_unknown_refusal(node, refusal, claimant, deadline)
        raise
    if not positions:
        try:
            prepare_isolation(node)
            save_task_note(node, own, deadline)
        except Refusal as fault:  # no node is drained for a job without GPUs
            log_hook_line(settings, fault.sentence(call.who), error=False)
        return None
    prepare_isolation(node)
    own.binds = environment.driver_binds(settings)
    own.positions = positions
    wait_for_gres_map(node, positions, deadline)
    want = ClaimRequest(
        len(positions),
        check=lambda chosen: environment.grant_variables(chosen, settings),
        share=share,
        kinds=request.count_gres_kinds(call, node),
    )
    want.counted = share  # by Slurm
    grant = retry_slurm_claim(node, call, own, want, deadline)
    claimant.token = grant.owner.token

    def tell() -> None:
        own.token, own.devices = grant.owner.token, order_slurm_devices(node, own.positions, grant)
        save_task_note(node, own, deadline)

    complete_claim(
        node,
        grant,
        deadline,
        lambda: grants.note_owed_line(settings.state_dir, node.store, grant.owner),
        tell,
        lambda: undo_claim(node, grant, observer_judge(node), deadline),
    )
    return grant


def wait_for_gres_map(node: Node, positions: list[str], deadline: Deadline) -> None:
    """Give gpulockd time to compare the map with a gres.conf that has just changed."""
    wait = deadline.sooner(node.settings.slurm_wait)
    while gres_map.is_map_awaited(node, positions) and wait.left() > 0:
        time.sleep(FIRST_PAUSE)


def prepare_isolation(node: Node) -> None:
    """Close slurmd where the node confines jobs; raise Refusal where it cannot."""
    if node.settings.isolation != "off":
        from gpulock.isolation import job
        from gpulock.slurm.steps import find_slurmds_above

        job.prepare_slurm_isolation(node, find_slurmds_above(node, os.getpid()))


def retry_slurm_claim(
    node: Node, call: SlurmHookCall, own: TaskNote, want: ClaimRequest, deadline: Deadline
) -> Grant:
    """Claim, and wait for a device that is still held: Slurm says that it is free."""
    wait = deadline.sooner(node.settings.slurm_wait)
    template = call.make_owner(node)
    template.positions = ",".join(own.positions)
    pause = FIRST_PAUSE
    while True:
        want.wanted = request.list_slurm_device_ids(call, node)
        try:
            return claim_devices(
                node, template, want, lambda: make_slurm_prolog_judge(node), deadline
            )
        except Refusal as refusal:
            if refusal.kind != BUSY or wait.left() <= 0:
                raise
        time.sleep(min(pause, max(wait.left(), 0.0)))
        pause = min(2 * pause, LONGEST_PAUSE)


def make_slurm_prolog_judge(node: Node) -> "Judge":
    """Return a judge for a prolog: of Slurm jobs only what their own epilog gave up."""
    from gpulock.alloc.liveness import Judge, process_verdict
    from gpulock.alloc.process_scan import ProcessScan
    from gpulock.slurm.steps import SlurmSteps
    from gpulock.slurm.verdict import hook_verdict

    steps = SlurmSteps(node.settings)
    rules: "dict[str, LivenessRule]" = {"slurm": hook_verdict, "process": process_verdict}
    scan = ProcessScan(node.proc, {"slurm": steps.owns})
    return Judge(node.boot_id, scan, rules, {"slurm": steps.add_members_and_steps})


def order_slurm_devices(node: Node, positions: list[str], grant: Grant) -> list[Device]:
    """Return the devices of a grant in the order of Slurm's positions, where it chose them."""
    if not request.slurm_selects_devices(node.settings):
        return grant.devices
    return gres_map.resolve_gres_devices(node.settings.state_dir, positions, grant.devices)


def save_task_note(node: Node, own: TaskNote, deadline: Deadline) -> None:
    """Write the job's note; raise Refusal.

    Under the gate, where a late Epilog of an earlier run compares and removes. A note without
    devices is written in any case: its job starts without them, or not at all.
    """
    try:
        node.store.check(make=True)
        if own.devices or own.refused:
            try:
                with Gate(node.store, deadline):
                    note.write_task_note(node.store, own)
                return
            except LockTimeout:
                if own.devices:
                    raise
        note.write_task_note(node.store, own)
    except (OSError, kv.MalformedError) as fault:
        kind, do = os_error_kind(fault), f"look at {node.store.root}"
        raise Refusal(kind, f"the note of job {own.job}: {fault}", do) from fault


def report_slurm_refusal(call: "SlurmHookCall | None", run: HookRun) -> int:
    """Tell everybody who must know, and return the exit code."""
    settings, refusal = run.settings, run.refusal
    assert refusal is not None
    sentence = refusal.sentence(call.who if call else "a job")
    if call is None:
        run.log(sentence, error=True)
        return NODE_BROKEN  # nothing can be told to the job: it must not start
    from gpulock.slurm import refuse

    if settings is None and os.geteuid() == call.uid != 0:
        # 24.11 to 25.11 may do so where RunInJob is set and the job is cancelled (docs/facts/
        # slurm.md, hooks inside of the job): its tasks find no note, and do not start
        run.log(sentence, error=True)
        return GO_ON
    known = settings or Settings({})
    if refusal.kind == BROKEN and known.on_broken == "stop":  # never for what one job asked
        refuse.drain_slurm_node(call, known, sentence)
        run.log(sentence, error=True)
        return NODE_BROKEN
    if settings is None:  # nor can its tasks read them, and without a note none of them starts
        noted = call.restart == 0  # one of an earlier run may stand, where the file is mended soon
        done = refuse.requeue_or_cancel_job(call, known, refusal, sentence, noted)
        run.log(f"{sentence}; {done}" if done else sentence, error=True)
        return GO_ON
    own = TaskNote(call.slurmd, call.job, call.uid, call.restart)
    own.refused, own.code = sentence, refuse.task_prolog_exit_code(refusal, settings)
    try:
        node = Node(settings)
        if note.is_task_note_superseded(node.store, own):
            run.log(f"{sentence}; a later run of it is here", error=True)
            return GO_ON  # of a slurmd that was killed: nobody waits for us
        save_task_note(node, own, Deadline(note.PATIENCE))
        noted = True
    except Refusal as fault:
        if fault.kind == BROKEN:
            run.log(sentence, error=True)
        run.log(fault.sentence(call.who), error=True)
        if fault.kind == BROKEN:
            return NODE_BROKEN
        noted = False
    done = refuse.requeue_or_cancel_job(call, settings, refusal, sentence, noted)
    run.log(f"{sentence}; {done}" if done else sentence, error=True)
    return GO_ON if noted or not done.startswith(refuse.NOT_DONE) else NODE_BROKEN
