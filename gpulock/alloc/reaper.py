# SPDX-License-Identifier: Apache-2.0
"""Settle locks under the gate: free what is proven dead and let go by everybody.

Hot, loaded when devices are short, and by every reconcile. Each lock is judged, then the last
guard looks whether anybody still has the device open. What the guard stops is marked `orphans`.
"""

from gpulock.alloc import device_users
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.liveness import ALIVE, DEAD, Judge, Verdict
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.memory_check import Handover

FREED, HELD, ORPHANS = "freed", "held", "orphans"


class ReapOutcome:
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


def make_open_files(node: Node, devices: list[Device], judge: Judge) -> OpenFiles:
    """Return who has which of the devices open, not looked at yet."""
    settings = node.settings
    return OpenFiles(
        judge.scan, devices, settings.dev_root, settings.allowed_processes, settings.driver_root
    )


def reap_locks(
    node: Node, held: dict[str, Lock], judge: Judge, holders: OpenFiles, dry_run: bool = False
) -> list[ReapOutcome]:
    """Judge every lock of `held`; free the dead ones nobody uses. Gate held."""
    for lock in held.values():
        node.store.read_details(lock)
    judge.attach_step_daemons(held)
    handover = make_handover(node)
    return [
        reap_lock(node, lock, judge, holders, held, dry_run, handover) for lock in held.values()
    ]


def make_handover(node: Node) -> "Handover | None":
    """Return the exporter's view of the devices' memory, None where LEFTOVER_PROCESSES is off."""
    if node.settings.leftover_processes == "off":
        return None
    from gpulock.alloc.memory_check import Handover

    return Handover(node)


def reap_lock(
    node: Node,
    lock: Lock,
    judge: Judge,
    holders: OpenFiles,
    held: dict[str, Lock],
    dry_run: bool,
    handover: "Handover | None",
) -> ReapOutcome:
    """Judge one lock (its details read), and free it where that is proven to be right.

    One that cannot be changed stays held, and keeps no other from being settled.
    """
    outcome = decide_reap(lock, judge, holders, held)
    if dry_run or outcome.act == HELD:
        return outcome
    how = f"reap: {outcome.reason}"
    if outcome.act == FREED and handover:
        kept = handover.reason_to_keep_lock(lock)
        if kept:
            return ReapOutcome(lock, HELD, outcome.verdict, f"draining: {kept}")
        how = handover.release_reason(lock, how)
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


def decide_reap(lock: Lock, judge: Judge, holders: OpenFiles, held: dict[str, Lock]) -> ReapOutcome:
    """Return what is to become of a lock: the verdict, then the last guard."""
    verdict = judge.verdict(lock)
    record = lock.owner
    if record is not None and record.draining and verdict.state == ALIVE:
        left = device_users.remaining_job_process(lock, judge)
        if left:
            return ReapOutcome(lock, HELD, verdict, f"draining: {left}")
        verdict = Verdict(DEAD, "released by its job, whose processes are gone")
    if verdict.state != DEAD:
        return ReapOutcome(lock, HELD, verdict, verdict.proof)
    left = (
        judge.leftover_reason(lock)
        if record is not None and record.boot_id == judge.boot_id
        else ""
    )
    if left:
        return ReapOutcome(lock, HELD, verdict, f"draining: {left}")
    left = (
        device_users.remaining_device_user(lock.id, record, holders, held)
        if record is not None
        else ""
    )
    if left:
        return ReapOutcome(lock, HELD if left == holders.blind else ORPHANS, verdict, left)
    return ReapOutcome(lock, FREED, verdict, verdict.proof)
