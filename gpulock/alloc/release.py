# SPDX-License-Identifier: Apache-2.0
"""Release a job's devices by owner, never by what an environment says; idempotent.

Hot. What the reaper keeps is marked `draining`: the next claim or reconcile frees it once the
processes are gone.
"""

from gpulock.alloc.liveness import Judge
from gpulock.alloc.reaper import ENDED, FREED, Reaper, ReapOutcome, make_recorded_device
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.store.repair import repair_locks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.process_scan import ProcessScan
    from gpulock.alloc.reaper import ClaimEnd


class ReleaseResult:
    """What a release did: ids `freed`, and (id, why) of what is `kept` until it is quiet.

    `known` says whether any lock was the job's, whatever became of it.
    """

    def __init__(self) -> None:
        self.freed: list[str] = []
        self.kept: list[tuple[str, str]] = []
        self.known = False

    def add(self, outcome: ReapOutcome) -> None:
        """Add what became of one lock; one that was freed or claimed anew meanwhile is neither."""
        lock = outcome.lock
        if outcome.act == FREED:
            self.freed.append(lock.id)
        elif not outcome.changed:
            self.kept.append((lock.id, outcome.reason))


def release_locks(
    node: Node,
    ours: "Callable[[Owner], bool]",
    judge: Judge,
    deadline: Deadline,
    how: str,
    over: "ClaimEnd" = ENDED,
) -> ReleaseResult:
    """Free every lock whose record is `ours`; raise Refusal where the node does not let us.

    Locks are read and processes looked at before the gate is taken, to hold it shortly: nothing
    of ours can be claimed meanwhile, and what somebody else freed shows by its token.
    """
    released = ReleaseResult()
    held = node.store.read_all_locks()
    if not held:
        return released
    node.store.check(make=True)  # somebody may have removed LOCK_DIR: the records tell all
    if not (mine := select_job_locks(held, ours)):
        return released
    released.known = True
    restrict_to_owners(judge.scan, mine)
    reaper = Reaper(node, judge, locked_devices(node, mine), held)
    for uid in {lock.owner.uid for lock in mine if lock.owner}:
        reaper.files.users_by_device(
            uid
        )  # whatever is left of the job: it may end before the gate is taken
    reaper.decide(mine, over)
    judge.scan.scan_closed = True
    with Gate(node.store, deadline):
        now = repair_locks(node.store, node.boot_id)
        mine = [lock for lock in mine if is_same_claim(lock, now.get(lock.id))]
        for outcome in reaper.finish(mine, over, how):
            released.add(outcome)
    return released


def is_same_claim(before: "Lock | None", now: "Lock | None") -> bool:
    """Return whether a lock is of the claim that had it before the gate was taken."""
    return bool(
        before and before.owner and now and now.owner and before.owner.token == now.owner.token
    )


def restrict_to_owners(scan: "ProcessScan", locks: list[Lock]) -> None:
    """Let a look leave out who cannot be of the job that has these locks."""
    scan.restrict({lock.owner.uid: lock.owner.user for lock in locks if lock.owner})


def select_job_locks(held: dict[str, Lock], ours: "Callable[[Owner], bool]") -> list[Lock]:
    """Return the locks whose record is ours."""
    return [lock for lock in held.values() if lock.owner and ours(lock.owner)]


def locked_devices(node: Node, locks: list[Lock]) -> list[Device]:
    """Return the locked devices as far as the reaper needs them, from the records.

    No driver is asked, but where a record does not tell the minor.
    """
    devices: list[Device] = []
    for lock in locks:
        device = make_recorded_device(lock)
        if device is None:
            return node.devices_if_driver()
        devices.append(device)
    return devices
