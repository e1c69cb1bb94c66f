# SPDX-License-Identifier: Apache-2.0
"""Release a job's devices by owner, never by what an environment says; idempotent.

Hot. A device is let go only when the last guard finds nothing of the job: otherwise the lock is
marked `draining`, and the next claim or reconcile frees it once the processes are gone.
"""

from gpulock.alloc import device_users, reaper
from gpulock.alloc.liveness import Judge
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class ReleaseResult:
    """What a release did: ids `freed`, and (id, why) of what is `kept` until it is quiet.

    `away` are those that went out of service, with why; `claims` has the uid of each claim, by
    token, whatever became of it.
    """

    __slots__ = ("away", "claims", "freed", "kept")

    def __init__(self) -> None:
        self.freed: list[str] = []
        self.kept: list[tuple[str, str]] = []
        self.away: list[tuple[str, str]] = []
        self.claims: dict[str, int] = {}


def release_locks(
    node: Node,
    ours: "Callable[[Owner], bool]",
    judge: Judge,
    deadline: Deadline,
    how: str,
) -> ReleaseResult:
    """Free every lock whose record is `ours`; raise Refusal where the node does not let us.

    Locks are read and processes looked at before the gate is taken, to hold it shortly: nothing
    of ours can be claimed meanwhile, and what somebody else freed shows by its token.
    """
    released = ReleaseResult()
    if not node.store.exists():
        return released
    node.store.check()
    held = node.store.read_all_locks()
    mine = select_job_locks(held, ours)
    if not mine:
        return released
    holders = reaper.make_open_files(node, locked_devices(node, mine), judge)
    if holders.any_device_open():
        judge.attach_step_daemons(held)
    quiet = clock_boottime()  # what the guard saw was not later
    handover = None
    if node.settings.leftover_processes != "off":
        from gpulock.alloc.memory_check import wait_for_memory_sample

        handover = wait_for_memory_sample(node, mine, quiet, deadline)
    with Gate(node.store.path, deadline.sooner(node.settings.gate_timeout)):
        for lock in mine.values():
            node.store.read_details(lock)
            left = device_users.remaining_job_process(lock, judge)
            if not left and lock.owner:
                left = device_users.remaining_device_user(lock.id, lock.owner, holders, held)
            if handover:
                left = left or handover.reason_to_keep_lock(lock, quiet)
            release_or_drain_lock(
                node, lock, left, handover.release_reason(lock, how) if handover else how, released
            )
    if handover:
        released.away += handover.away.items()
    return released


def select_job_locks(held: dict[str, Lock], ours: "Callable[[Owner], bool]") -> dict[str, Lock]:
    """Return the locks whose record is ours."""
    return {name: lock for name, lock in held.items() if lock.owner and ours(lock.owner)}


def release_or_drain_lock(
    node: Node, lock: Lock, left: str, how: str, released: ReleaseResult
) -> None:
    """Free one lock, or mark it as draining because of what is `left` of its job."""
    record = lock.owner
    assert record is not None
    released.claims[record.token] = record.uid
    try:
        if left:
            if not record.draining and node.store.has_token(lock.id, record.token):
                node.store.rewrite(lock.id, record.copy(draining=1))
            released.kept.append((lock.id, left))
        else:
            node.retire(lock, how)
            released.freed.append(lock.id)
    except FileNotFoundError:
        return  # freed meanwhile
    except OSError as fault:
        released.kept.append((lock.id, f"it cannot be freed: {fault}"))
    except Refusal:
        return  # another's by now


def locked_devices(node: Node, held: dict[str, Lock]) -> list[Device]:
    """Return the locked devices as far as the guard needs them, from the records.

    No driver is asked, but where a record does not tell the minor.
    """
    found: list[Device] = []
    for lock in held.values():
        minor = lock.owner.minor if lock.owner else ""
        if not (minor.isascii() and minor.isdigit()):
            return devices_if_driver(node)
        device = Device(lock.id.partition(".gi")[0], -1)
        device.id, device.minor = lock.id, int(minor)
        found.append(device)
    return found


def devices_if_driver(node: Node) -> list[Device]:
    """Return the node's devices, none where no driver is loaded: then none can be open."""
    try:
        return node.devices()
    except Refusal:
        return []
