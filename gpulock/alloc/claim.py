# SPDX-License-Identifier: Apache-2.0
"""Claim devices for one job, all or none.

Hot. The record comes first, then each lock by mkdir. After a crash at any instruction the next
holder of the gate completes or removes what is there (store/repair.py); the job never starts.
"""

import os
import time

from gpulock.alloc.availability import (
    ClaimAttempt,
    pick_free_devices,
    reap_held_locks,
    scan_before_gate,
)
from gpulock.alloc.choose import ClaimRequest
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import LockTimeout, Refusal, os_error_kind
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import grants
from gpulock.store.events import format_claimant, note_claim
from gpulock.store.gate import Gate
from gpulock.store.owner import Owner
from gpulock.store.repair import repair_locks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.liveness import Judge


class Grant:
    """The devices of a job, by index, with the record that holds them.

    `fresh` is False where nothing was claimed: the same run asked again, or a task shares what its
    job holds. `waited` is the time at the gate in seconds.
    """

    def __init__(
        self, granted: list[Device], record: Owner, fresh: bool = True, waited: float = 0.0
    ) -> None:
        self.devices = granted
        self.owner = record
        self.fresh = fresh
        self.waited = waited


def claim_devices(
    node: Node,
    template: Owner,
    want: ClaimRequest,
    judge: "Callable[[], Judge]",
    deadline: Deadline,
) -> Grant:
    """Lock what is wanted for the owner that `template` describes; raise Refusal.

    `judge` is called only when something must be judged. Where devices are short the gate is left
    for a look at open files, which may take long, and taken once more.
    """
    attempt = ClaimAttempt(node, template, want, judge)
    devices = attempt.devices
    several = any([d.parent or d.model != devices[0].model for d in devices])
    if want.kinds or (several and not want.wanted and not want.share):
        from gpulock.alloc.kinds import resolve_kinds

        resolve_kinds(node, devices, want)
    healthy = [d.id for d in devices if not d.fault]
    if want.share and not want.counted:
        from gpulock.alloc.shares import check_share_request

        check_share_request(devices, want, node.settings)
    elif len(healthy) < want.count or any([name not in healthy for name in want.wanted]):
        from gpulock.alloc.shortage import impossible_refusal

        raise impossible_refusal(devices, want, node.settings.expected_gpus)
    want.uid, want.asked = template.uid, {}  # who waits claims again with the same request
    node.store.check(make=True)
    waited = 0.0
    try:
        while True:
            with Gate(node.store, deadline) as gate:
                waited += gate.waited
                try:
                    grant = claim_under_gate(attempt, gate)
                except Refusal as refusal:
                    from gpulock.alloc.streaks import count_refusal

                    count_refusal(node, refusal, template, waited)
                    raise
                if grant:
                    grant.waited = waited
                    if grant.fresh:
                        name = format_claimant(template.user, template.job())
                        note_claim(node.store.path, "granted", name, waited)
                    return grant
            if want.asked and want.patience:
                from gpulock.alloc.checks import wait_for_checks

                wait_for_checks(node, want.asked, deadline.sooner(want.patience))
            attempt.ahead = scan_before_gate(node, devices, judge(), template)
    except LockTimeout as refusal:
        from gpulock.alloc.streaks import note_lock_timeout

        note_lock_timeout(node, refusal, template)
        raise


def count_unknown_refusal(
    node: Node, refusal: Refusal, claimant: Owner, deadline: Deadline
) -> None:
    """Count an unknown that was met before the gate; may turn the refusal into BROKEN.

    What fails here, were it that a module cannot be loaded, leaves the refusal as it is.
    """
    try:
        from gpulock.alloc.streaks import count_refusal

        node.store.check(make=True)
        with Gate(node.store, deadline) as gate:
            count_refusal(node, refusal, claimant, gate.waited)
    except (Refusal, ImportError, OSError, MemoryError):
        return


def claim_under_gate(attempt: ClaimAttempt, gate: Gate) -> "Grant | None":
    """Choose and lock devices, or find the same run's claim; raise Refusal. The gate is held.

    None: to be called again, after a look at processes that it needs, or once a test of a device
    has given way.
    """
    node, devices, want, template = attempt.node, attempt.devices, attempt.want, attempt.template
    if node.store.boot_id() != node.boot_id:
        from gpulock.store import boot

        boot.prepare_boot(node.store, node.settings.state_dir, node.boot_id, node.name)
    held = repair_locks(node.store, node.boot_id)
    key = template.key()
    mine = [one for one in held.values() if one.owner and one.owner.key() == key]
    if mine:
        want.check_held(mine)
        from gpulock.alloc import same_job

        mine = same_job.select_own_locks(mine, template)
    if mine:
        again, record = same_job.granted_before(attempt, mine), mine[0].owner
        if again and record:
            return Grant(again, record, fresh=False)
        if attempt.ahead is None:
            return None
        attempt.ahead.held = held
        same_job.release_previous_run(attempt.ahead, mine, template)
        held = node.store.read_all_locks()
    chosen, out = pick_free_devices(node, devices, held, want)
    if not chosen:
        if attempt.ahead is None:
            return None
        reap_held_locks(attempt.ahead, held)
        held = node.store.read_detailed_locks()
        chosen, out = pick_free_devices(node, devices, held, want)  # some may be out by now
    if not chosen and not want.asked:
        from gpulock.alloc.checks import ask_checks_to_end

        want.asked = ask_checks_to_end(node, devices, held, want)
        if want.asked:
            return None  # once: gpulockd ends them meanwhile
    if not chosen:
        from gpulock.alloc.shortage import shortage_refusal

        raise shortage_refusal(devices, held, out, want, node.settings)
    want.check(chosen)
    return lock_devices(node, gate, chosen, template)


def lock_devices(node: Node, gate: Gate, chosen: list[Device], template: Owner) -> Grant:
    """Write the record and make every lock, or nothing of it; raise Refusal.

    Nothing stays where somebody replaced the gate meanwhile.
    """
    record = template.copy(
        token=os.urandom(8).hex(),
        devices=tuple([d.id for d in chosen]),
        uuids=tuple([d.uuid for d in chosen]),
        minors=tuple([str(d.minor) for d in chosen]),
        places=min([d.places for d in chosen]),  # of unlike cards none has too many
        claimed_at=time.time(),
        claimed_boottime=clock_boottime(),
    )
    try:
        grants.make_claim(node.store, record)
    except (OSError, ValueError) as fault:
        if not gate.is_named():
            raise gate.replaced_refusal() from fault
        why = f"a lock cannot be written: {fault}"
        raise Refusal(os_error_kind(fault), why, "run gpulock doctor") from fault
    if not gate.is_named():
        grants.undo_claim(node.store, record.token, record.devices)
        raise gate.replaced_refusal()
    return Grant(chosen, record)
