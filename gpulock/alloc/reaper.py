# SPDX-License-Identifier: Apache-2.0
"""Settle locks under the gate: free what is proven dead and let go by everybody.

Hot, loaded when devices are short, and by every reconcile. Each lock is judged, then the last
guard looks whether anybody still has the device open. What the guard stops is marked `orphans`.
"""

from gpulock.alloc import device_users
from gpulock.alloc.device_users import Holders
from gpulock.alloc.liveness import ALIVE, DEAD, Judge, Verdict
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.memory_check import Handover

FREED, HELD, ORPHANS = "freed", "held", "orphans"


class Outcome:
    """What became of one lock: `act` is FREED, HELD or ORPHANS; the verdict says why.

    `away` says why its device went out of service with that, empty where it did not.
    """

    __slots__ = ("act", "away", "lock", "reason", "verdict")

    def __init__(self, lock: Lock, act: str, verdict: Verdict, reason: str) -> None:
        self.lock = lock
        self.act = act
        self.verdict = verdict
        self.reason = reason
        self.away = ""


def make_holders(node: Node, devices: list[Device], judge: Judge) -> Holders:
    """Return who has which of the devices open, not looked at yet."""
    settings = node.settings
    return Holders(judge.scan, devices, settings.dev_root, settings.services, settings.driver_root)


def settle(
    node: Node, held: dict[str, Lock], judge: Judge, holders: Holders, dry_run: bool = False
) -> list[Outcome]:
    """Judge every lock of `held`; free the dead ones nobody uses. Gate held."""
    for lock in held.values():
        node.store.read_details(lock)
    judge.attach(held)
    handover = look_at_memory(node)
    return [
        settle_one(node, lock, judge, holders, held, dry_run, handover) for lock in held.values()
    ]


def look_at_memory(node: Node) -> "Handover | None":
    """Return what the exporter tells of the devices' memory, None where CLEAN is off."""
    if node.settings.clean == "off":
        return None
    from gpulock.alloc.memory_check import Handover

    return Handover(node)


def settle_one(
    node: Node,
    lock: Lock,
    judge: Judge,
    holders: Holders,
    held: dict[str, Lock],
    dry_run: bool,
    handover: "Handover | None",
) -> Outcome:
    """Judge one lock (its details read), and free it where that is proven to be right.

    One that cannot be changed stays held, and keeps no other from being settled.
    """
    outcome = decide(lock, judge, holders, held)
    if dry_run or outcome.act == HELD:
        return outcome
    how = f"reap: {outcome.reason}"
    if outcome.act == FREED and handover:
        kept = handover.keeps(lock)
        if kept:
            return Outcome(lock, HELD, outcome.verdict, f"settling: {kept}")
        how = handover.how(lock, how)
        outcome.away = handover.away.get(lock.id, "")
    try:
        if outcome.act == FREED:
            node.retire(lock, how)
        elif lock.orphans != outcome.reason:
            node.store.mark_orphans(lock.id, outcome.reason)
    except Refusal as changed:
        outcome.act, outcome.reason = HELD, changed.why
    except OSError as fault:
        outcome.act, outcome.reason = HELD, f"it cannot be changed: {fault}"
    return outcome


def decide(lock: Lock, judge: Judge, holders: Holders, held: dict[str, Lock]) -> Outcome:
    """Return what is to become of a lock: the verdict, then the last guard."""
    verdict = judge.verdict(lock)
    record = lock.owner
    if record is not None and record.settling and verdict.state == ALIVE:
        left = device_users.group_left(lock, judge)
        if left:
            return Outcome(lock, HELD, verdict, f"settling: {left}")
        verdict = Verdict(DEAD, "released by its job, whose processes are gone")
    if verdict.state != DEAD:
        return Outcome(lock, HELD, verdict, verdict.proof)
    left = judge.left(lock) if record is not None and record.boot_id == judge.boot_id else ""
    if left:
        return Outcome(lock, HELD, verdict, f"settling: {left}")
    left = device_users.open_left(lock.id, record, holders, held) if record is not None else ""
    if left:
        return Outcome(lock, HELD if left == holders.blind else ORPHANS, verdict, left)
    return Outcome(lock, FREED, verdict, verdict.proof)
