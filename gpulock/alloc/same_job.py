# SPDX-License-Identifier: Apache-2.0
"""What a claim does about locks that its own job has here already: answer again, share, or free.

Hot, loaded where there are such locks. The gate is held.
"""

from gpulock.alloc.reaper import CUT_SHORT, FREED
from gpulock.errors import BUSY, UNKNOWN, Refusal, os_error_kind
from gpulock.node.devices import SHARE, Device, place_device
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.store.verdicts import ALIVE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.availability import ClaimAttempt
    from gpulock.alloc.reaper import Reaper


def select_own_locks(locks: list[Lock], template: Owner) -> list[Lock]:
    """Return those of a job's `locks` that are of this run or an earlier one.

    Those of another user whose job got the id again in Slurm are left out. Raises Refusal where a
    later run of the job holds devices.
    """
    mine: list[Lock] = []
    for lock in locks:
        record = lock.owner
        assert record is not None
        later, same_user = record.restart > template.restart, record.uid == template.uid
        if later and same_user and record.boot_id == template.boot_id:
            raise Refusal(BUSY, "a later run of the job holds devices here", "nothing to do")
        if record.scheduler != "slurm" or (same_user and not later):
            mine.append(lock)
    return mine


def granted_before(attempt: "ClaimAttempt", mine: list[Lock]) -> list[Device]:
    """Return the devices that a claim is granted because its job has them: nothing for others.

    This very run gets the same again, never a Slurm job's: its Prolog runs once, and a second one
    of the same id may be of a job that got the id again, or was started again without an Epilog.
    A task shares what its job holds here, while that lives: its shepherd is an anchor. In either
    case the grant is whole, and not being released. Raises Refusal.
    """
    node, template, want = attempt.node, attempt.template, attempt.want
    record = mine[0].owner
    assert record is not None
    granted = whole_grant(mine, attempt.devices)
    node.store.read_details(mine)
    if not granted or record.uid != template.uid or record.draining:
        return []
    same_run = (record.run(), record.boot_id) == (template.run(), template.boot_id)
    if same_run and record.scheduler != "slurm" and len(granted) == want.count:
        return granted
    if not want.join:
        return []
    judge = attempt.make_judge()
    if not all([judge.verdict(lock).state == ALIVE for lock in mine]):
        return []
    try:
        node.store.anchor(record.token, template.pid, template.start, template.add_grp_id)
    except OSError as fault:
        kind = os_error_kind(fault)
        do = f"look at {node.store.root}"
        raise Refusal(kind, f"the job's claim cannot be joined: {fault}", do) from fault
    return granted


def whole_grant(mine: list[Lock], devices: list[Device]) -> list[Device]:
    """Return the devices of a grant that is whole: one token, every device locked and there."""
    record = mine[0].owner
    assert record is not None
    ids = {lock.id for lock in mine if lock.owner and lock.owner.token == record.token}
    granted = granted_devices(devices, ids, record.places)
    whole = ids == set(record.devices) and len(ids) == len(mine) == len(granted)
    return granted if whole else []


def granted_devices(devices: list[Device], ids: set[str], places: int) -> list[Device]:
    """Return the devices, or places on them, that have these ids, in the order of the node."""
    granted: list[Device] = []
    for card in devices:
        if card.id in ids:
            granted.append(card)
        here = sorted([name for name in ids if name.startswith(card.id + SHARE)])
        granted += [place_device(card, name, places) for name in here]
    return granted


def release_previous_run(engine: "Reaper", mine: list[Lock], template: Owner) -> None:
    """Free what an earlier run of the job, or a cut-short claim of this one, left; or refuse."""
    own = [lock for lock in mine if lock.owner and is_cut_short(lock.owner, template)]
    how = "claim: this run's claim was cut short"
    others = [lock for lock in mine if lock not in own]
    outcomes = [*engine.finish(own, CUT_SHORT, how), *engine.finish(others)]
    for outcome in [one for one in outcomes if one.act != FREED]:
        raise Refusal(
            UNKNOWN if outcome.fault and outcome.lock in own else BUSY,
            f"{outcome.lock.id} is still held by an earlier run: {outcome.reason}",
            f"see gpulock why {outcome.lock.id}",
        )


def is_cut_short(record: Owner, template: Owner) -> bool:
    """Return whether a record is what a killed claim of this run left.

    Of a Slurm job each earlier run counts: no two run at the same time.
    """
    own = record.run() == template.run() or record.scheduler == "slurm"
    return own and record.boot_id == template.boot_id
