# SPDX-License-Identifier: Apache-2.0
"""Release a job's devices by owner, never by what an environment says; idempotent.

Hot. A device is let go only when the last guard finds nothing of the job: otherwise the lock is
marked `settling`, and the next claim or reconcile frees it once the processes are gone.
"""

from gpulock.alloc import device_users, reaper
from gpulock.alloc.liveness import Judge
from gpulock.deadline import Deadline, boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Released:
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


def release(
    node: Node,
    ours: "Callable[[Owner], bool]",
    judge: Judge,
    deadline: Deadline,
    how: str,
) -> Released:
    """Free every lock whose record is `ours`; raise Refusal where the node does not let us.

    Locks are read and processes looked at before the gate is taken, to hold it shortly: nothing
    of ours can be claimed meanwhile, and what somebody else freed shows by its token.
    """
    released = Released()
    if not node.store.exists():
        return released
    node.store.check()
    held = node.store.all()
    mine = ours_of(held, ours)
    if not mine:
        return released
    holders = reaper.make_holders(node, places(node, mine), judge)
    if holders.anybody():
        judge.attach(held)
    quiet = boottime()  # what the guard saw was not later
    handover = None
    if node.settings.clean != "off":
        from gpulock.alloc.memory_check import wait

        handover = wait(node, mine, quiet, deadline)
    with Gate(node.store.path, deadline.sooner(node.settings.gate_timeout)):
        for lock in mine.values():
            node.store.read_details(lock)
            left = device_users.group_left(lock, judge)
            if not left and lock.owner:
                left = device_users.open_left(lock.id, lock.owner, holders, held)
            if handover:
                left = left or handover.keeps(lock, quiet)
            release_one(node, lock, left, handover.how(lock, how) if handover else how, released)
    if handover:
        released.away += handover.away.items()
    return released


def ours_of(held: dict[str, Lock], ours: "Callable[[Owner], bool]") -> dict[str, Lock]:
    """Return the locks whose record is ours."""
    return {name: lock for name, lock in held.items() if lock.owner and ours(lock.owner)}


def release_one(node: Node, lock: Lock, left: str, how: str, released: Released) -> None:
    """Free one lock, or mark it as settling because of what is `left` of its job."""
    record = lock.owner
    assert record is not None
    released.claims[record.token] = record.uid
    try:
        if left:
            if not record.settling and node.store.still(lock.id, record.token):
                node.store.rewrite(lock.id, record.copy(settling=1))
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


def places(node: Node, held: dict[str, Lock]) -> list[Device]:
    """Return the locked devices as far as the guard needs them, from the records.

    No driver is asked, but where a record does not tell the minor.
    """
    found: list[Device] = []
    for lock in held.values():
        minor = lock.owner.minor if lock.owner else ""
        if not (minor.isascii() and minor.isdigit()):
            return present(node)
        device = Device(lock.id.partition(".gi")[0], -1)
        device.id, device.minor = lock.id, int(minor)
        found.append(device)
    return found


def present(node: Node) -> list[Device]:
    """Return the node's devices, none where no driver is loaded: then none can be open."""
    try:
        return node.devices()
    except Refusal:
        return []
