# SPDX-License-Identifier: Apache-2.0
"""Claim devices for one job, all or none.

Hot. The order of the steps is docs/architecture.md's: after a crash at any instruction there is
no lock, a lock without owner, or whole locks of a job that never starts. No instruction leaves a
device granted twice, because mkdir is the grant.
"""

import os
import time

from gpulock.alloc.availability import (
    check_claim_possible,
    foreign_device_ids,
    open_device_ids,
    pick_free_devices,
    reap_held_locks,
    shortage_refusal,
)
from gpulock.alloc.grant import (
    ClaimRequest,
    Grant,
    is_same_job,
    join_grant,
    release_previous_run,
    same_run_grant,
)
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, BUSY, UNKNOWN, LockTimeout, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import boot, kv, owner, quarantine
from gpulock.store.counters import ClaimCounters, note_lock_timeout
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.liveness import Judge


def claim_devices(
    node: Node,
    template: Owner,
    count: int,
    judge: "Callable[[], Judge]",
    deadline: Deadline,
    wanted: tuple[str, ...] = (),
    join: bool = False,
    check: "Callable[[list[Device]], object]" = list,
) -> Grant:
    """Lock `count` devices (or exactly `wanted`) for the owner that `template` describes.

    `judge` is called only when something must be settled. With `join`, a task of a job that
    holds devices here shares them. `check` may still refuse what was chosen. Raises Refusal.
    """
    return serve_claim_request(
        node, template, ClaimRequest(count, wanted, join, check), judge, deadline
    )


def claim_preferring_unused(
    node: Node, template: Owner, count: int, judge: "Callable[[], Judge]", deadline: Deadline
) -> Grant:
    """Claim as `claim` does, but devices that somebody has open come last; raise Refusal.

    That costs a look at all open files, which a command may take and a hook may not.
    """
    want = ClaimRequest(count, (), False, list)
    want.last = foreign_device_ids(node, node.devices(), count, template.pid)
    return serve_claim_request(node, template, want, judge, deadline)


def serve_claim_request(
    node: Node,
    template: Owner,
    want: ClaimRequest,
    judge: "Callable[[], Judge]",
    deadline: Deadline,
) -> Grant:
    """Lock what is wanted; raise Refusal."""
    judge = memoize_judge(judge)
    found = node.devices()
    check_claim_possible(found, want, node.settings.expected_gpus)
    boot.ensure_lock_dir(node.store)
    try:
        with Gate(node.store.path, deadline.sooner(node.settings.gate_timeout)) as gate:
            totals = ClaimCounters(node.store)
            try:
                boot.prepare_boot(node.store, node.settings.state_dir, node.boot_id, node.name)
                grant = claim_under_gate(node, found, template, want, judge, totals)
            except Refusal as refusal:
                count_refusal(totals, refusal, template, gate.waited)
                raise
            grant.waited = gate.waited
            totals.count_grant(gate.waited)
            totals.save()
            return grant
    except LockTimeout:
        note_lock_timeout(node.store)
        raise


def memoize_judge(make: "Callable[[], Judge]") -> "Callable[[], Judge]":
    """Return `make` so that it is called at most once: one look at /proc serves a whole claim."""
    made: list[Judge] = []

    def judge() -> "Judge":
        if not made:
            made.append(make())
        return made[0]

    return judge


def count_refusal(totals: ClaimCounters, refusal: Refusal, template: Owner, waited: float) -> None:
    """Count a refusal; a streak of unknowns means that the node is broken, not the jobs."""
    if refusal.kind == UNKNOWN and totals.note_unknown_streak(template.job(), template.user):
        refusal.kind = BROKEN
        refusal.why += " (for several jobs in a row)"
    totals.count_result(refusal.kind, waited)
    totals.save()


def count_unknown_refusal(
    node: Node, refusal: Refusal, template: Owner, deadline: Deadline
) -> None:
    """Count an unknown that was met before the gate; may turn the refusal into BROKEN."""
    try:
        boot.ensure_lock_dir(node.store)
        with Gate(node.store.path, deadline.sooner(node.settings.gate_timeout)) as gate:
            count_refusal(ClaimCounters(node.store), refusal, template, gate.waited)
    except (Refusal, OSError):
        return  # the first refusal is the one to tell


def claim_under_gate(
    node: Node,
    found: list[Device],
    template: Owner,
    want: ClaimRequest,
    judge: "Callable[[], Judge]",
    totals: ClaimCounters,
) -> Grant:
    """Do steps 4 to 7 of the life of a claim; the gate is held."""
    held = node.store.read_all_locks()
    check_later_run(held, template)
    mine = [lock for lock in held.values() if lock.owner and is_same_job(lock.owner, template)]
    if mine:
        again = same_run_grant(mine, template, want.count, found)
        if again is None and want.join:
            again = join_grant(node, mine, template, found, judge())
        if again:
            return again
        release_previous_run(node, mine, template, found, judge())
        held = node.store.read_all_locks()
    out = excluded_device_ids(node, found, judge)
    chosen = pick_free_devices(node, found, held, out, want)
    if not chosen:
        reap_held_locks(node, found, held, judge(), totals)
        held = node.store.read_all_locks()
        out = excluded_device_ids(node, found, judge)  # what was freed may have gone to quarantine
        chosen = pick_free_devices(node, found, held, out, want)
    if not chosen:
        raise shortage_refusal(found, held, out, want)
    want.check(chosen)
    return lock_devices(node, chosen, template)


def excluded_device_ids(node: Node, found: list[Device], judge: "Callable[[], Judge]") -> list[str]:
    """Return the ids that nobody is granted: quarantined, reserved, and once locks were lost open.

    Raises Refusal.
    """
    out = [
        device
        for folder in (quarantine.QUARANTINE, quarantine.RESERVES)
        for device in quarantine.list_noted_devices(node.settings.state_dir, folder)
    ]
    return (
        [*out, *open_device_ids(node, found, judge())] if boot.locks_were_lost(node.store) else out
    )


def check_later_run(held: dict[str, Lock], template: Owner) -> None:
    """Refuse a claim that comes after the next run of its job has claimed here."""
    for lock in held.values():
        record = lock.owner
        if record is None or record.key() != template.key() or record.uid != template.uid:
            continue
        if record.restart > template.restart and record.boot_id == template.boot_id:
            raise Refusal(BUSY, "a later run of the job holds devices here", "nothing to do")


def device_record_lines(device: Device) -> str:
    """Return what the record in a device's lock says of that device alone."""
    uuid = [("uuid", device.uuid)] if device.uuid else []
    return kv.encode_pairs([*uuid, ("minor", str(device.minor))])


def lock_devices(node: Node, chosen: list[Device], template: Owner) -> Grant:
    """Make every lock, or none: what was made is undone newest first, then the error rises."""
    record = template.copy(
        token=os.urandom(8).hex(),
        devices=tuple([d.id for d in chosen]),
        claimed_at=time.time(),
        claimed_boottime=clock_boottime(),
    )
    made: list[str] = []
    try:
        text = owner.encode_owner(record)
        for device in chosen:
            made.append(device.id)
            node.store.make_text(device.id, text + device_record_lines(device))
    except BaseException as fault:
        if isinstance(fault, FileExistsError):
            made.pop()
        for name in reversed(made):
            node.store.undo(name)
        if isinstance(fault, (OSError, ValueError)):
            raise Refusal(
                BROKEN, f"a lock cannot be written: {fault}", "look at LOCK_DIR"
            ) from fault
        raise
    return Grant(chosen, record, True, 0.0)
