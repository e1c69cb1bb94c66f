# SPDX-License-Identifier: Apache-2.0
"""What a claim does about locks that its own job has here already: answer again, share, or free.

Hot, loaded where there are such locks. The gate is held.
"""

from gpulock.alloc.liveness import Judge
from gpulock.alloc.reaper import CUT_SHORT, DIED, FREED
from gpulock.errors import BUSY, UNKNOWN, Refusal, os_error_kind
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device, place_device
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.availability import ClaimAttempt
    from gpulock.alloc.reaper import Reaper


class LookNeededError(Exception):
    """Say that locks must be judged, which is not begun while the gate is held."""


def granted_before(
    attempt: "ClaimAttempt", locks: list[Lock]
) -> "tuple[list[Device], Owner] | None":
    """Return the devices that a claim of a job which has `locks` here is granted, and the record.

    None where it has to be granted others: what an earlier run left is freed then, by the look
    ahead of the gate; raises LookNeededError without one. Raises Refusal, also where a later run
    of the job holds devices.
    """
    node, template, found = attempt.node, attempt.template, attempt.devices
    for lock in locks:
        record = lock.owner
        if record is None or record.uid != template.uid or record.boot_id != template.boot_id:
            continue
        if record.restart > template.restart:
            raise Refusal(BUSY, "a later run of the job holds devices here", "nothing to do")
    mine = [lock for lock in locks if lock.owner and is_same_job(lock.owner, template)]
    if not mine:
        return None
    granted = same_run_devices(mine, template, attempt.want.count, found)
    if not granted and attempt.want.join:
        granted = join_devices(node, mine, template, found, attempt.judge())
    if granted and mine[0].owner:
        return granted, mine[0].owner
    if attempt.ahead is None:
        raise LookNeededError
    release_previous_run(node, mine, template, attempt.ahead)
    return None


def is_same_job(record: Owner, template: Owner) -> bool:
    """Return whether a record of its key is of the job that asks: not of another user who got its
    id again, nor of a later run.
    """
    other = record.uid != template.uid or record.restart > template.restart
    return not (record.scheduler == "slurm" and other)


def same_run_devices(
    mine: list[Lock], template: Owner, count: int, found: list[Device]
) -> list[Device]:
    """Return the devices this very run has already, if its grant is whole and not being released.

    Never a Slurm job's: its Prolog runs once, and a second one of the same id may be of a job
    that got the id again, or was started again without an Epilog.
    """
    record = mine[0].owner
    assert record is not None
    if record.scheduler == "slurm":
        return []
    granted = whole_grant(mine, found)
    same = (record.uid, record.run(), record.boot_id, record.draining) == (
        template.uid,
        template.run(),
        template.boot_id,
        0,
    )
    return granted if len(granted) == count and same else []


def whole_grant(mine: list[Lock], found: list[Device]) -> list[Device]:
    """Return the devices of a grant that is whole: one token, every device locked and there."""
    record = mine[0].owner
    assert record is not None
    ids = {lock.id for lock in mine if lock.owner and lock.owner.token == record.token}
    granted = granted_devices(found, ids, record.places)
    whole = ids == set(record.devices) and len(ids) == len(mine) == len(granted)
    return granted if whole else []


def granted_devices(found: list[Device], ids: set[str], places: int) -> list[Device]:
    """Return the devices, or places on them, that have these ids, in the order of the node."""
    granted: list[Device] = []
    for card in found:
        if card.id in ids:
            granted.append(card)
        here = sorted([name for name in ids if name.startswith(card.id + SHARE)])
        granted += [place_device(card, name, places) for name in here]
    return granted


def join_devices(
    node: Node, mine: list[Lock], template: Owner, found: list[Device], judge: Judge
) -> list[Device]:
    """Let a task share what its job holds here, while that job lives: its shepherd is an anchor.

    Nothing where there is no whole, living grant. Raises Refusal.
    """
    record = mine[0].owner
    assert record is not None
    granted = whole_grant(mine, found)
    if not granted or record.uid != template.uid or record.draining:
        return []
    for lock in mine:
        node.store.read_details(lock)
        if judge.verdict(lock).state != "alive":
            return []
    try:
        node.store.anchor(record.token, template.pid, template.start, template.add_grp_id)
    except OSError as fault:
        kind = os_error_kind(fault)
        raise Refusal(kind, f"a lock cannot be joined: {fault}", "look at LOCK_DIR") from fault
    return granted


def release_previous_run(node: Node, mine: list[Lock], template: Owner, engine: "Reaper") -> None:
    """Free what an earlier run of the job, or a cut-short claim of this one, left; or refuse."""
    engine.held = node.store.read_all_locks()
    for lock in mine:
        node.store.read_details(lock)
    own = [lock for lock in mine if lock.owner and is_cut_short(lock.owner, template)]
    how = "claim: this run's claim was cut short"
    others = [lock for lock in mine if lock not in own]
    outcomes = [*engine.finish(own, CUT_SHORT, how), *engine.finish(others, DIED)]
    for outcome in [one for one in outcomes if one.act != FREED]:
        raise Refusal(
            UNKNOWN if outcome.fault and outcome.lock in own else BUSY,
            f"{outcome.lock.id} is still held by an earlier run: {outcome.reason}",
            f"see gpulock why {outcome.lock.id}",
        )


def is_cut_short(record: Owner, template: Owner) -> bool:
    """Return whether a record is what a killed claim of this very run left."""
    own = record.run() == template.run() or record.scheduler == "slurm"
    return own and record.boot_id == template.boot_id
