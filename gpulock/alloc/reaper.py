# SPDX-License-Identifier: Apache-2.0
"""The one engine that decides whether a lock may go, and that frees it.

Hot, loaded when devices are short, by every release and by every reconcile. A claim is over in
one of four ways (DIED, ENDED, CUT_SHORT, GIVEN_BACK). Then a process of its user keeps the device
that it has open, unless another claim explains that. So does one of its job, but for GIVEN_BACK,
whose owner goes on. A process that has the device of a user's claim open is that claim's as well.
"""

from gpulock.alloc.device_users import OpenFiles, remaining_device_user
from gpulock.alloc.liveness import Judge
from gpulock.errors import BUSY, Refusal, os_error_kind
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device
from gpulock.store import grants
from gpulock.store.locks import Lock
from gpulock.store.repair import repair_locks
from gpulock.store.verdicts import ALIVE, DEAD, NOT_JUDGED, RELEASED, UNKNOWN, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Literal

    ReapAct = Literal["freed", "held", "orphans"]
    ClaimEnd = Literal["died", "ended", "cut short", "given back"]

FREED: "ReapAct" = "freed"
HELD: "ReapAct" = "held"
ORPHANS: "ReapAct" = "orphans"
# How a claim is over. DIED has to be proven; the other three are known to the caller.
DIED: "ClaimEnd" = "died"
ENDED: "ClaimEnd" = "ended"  # an epilog, a claim undone or over; what is left keeps it
CUT_SHORT: "ClaimEnd" = "cut short"  # the same run claims again
GIVEN_BACK: "ClaimEnd" = "given back"  # by a living owner, whose processes may stay


class ReapOutcome:
    """What becomes of one lock: `act` is FREED, HELD or ORPHANS; the verdict and reason say why.

    `changed` is True where the lock was freed or claimed anew meanwhile, `fault` what could not be
    written.
    """

    def __init__(self, lock: Lock, act: "ReapAct", verdict: Verdict, reason: str) -> None:
        self.lock = lock
        self.act = act
        self.verdict = verdict
        self.reason = reason
        self.changed = False
        self.fault = ""

    def fail(self, fault: OSError, what: str) -> None:
        """Note that the lock stays, because it could not be changed."""
        self.changed = isinstance(fault, FileNotFoundError)
        self.fault = self.reason = f"it cannot be {what}: {fault}"
        self.act = HELD


def judge_claim(lock: Lock, judge: Judge, over: "ClaimEnd") -> tuple[Verdict, str]:
    """Return the verdict on a claim that is `over`, by a lock of it, and why it stays, or nothing.

    The lock's details are read. Looks at processes that were not looked at before.
    """
    record = lock.owner
    verdict = judge.verdict(lock) if over == DIED else Verdict(NOT_JUDGED, "")
    ended = over in (ENDED, CUT_SHORT)
    if over == DIED and record is not None and record.draining and verdict.state == ALIVE:
        ended = True  # its epilog gave it up: only what it left is alive, and decides
    if over == DIED and not ended and verdict.state != DEAD:
        return verdict, verdict.proof
    assert record is not None  # of a lock without one nothing is known, or asked
    ours = ended or (over == DIED and record.boot_id == judge.boot_id)
    if ours and (left := judge.job_processes(lock).reason()):
        return verdict, f"draining: {left}" if over == DIED else left
    if verdict.state == ALIVE:
        verdict = Verdict(DEAD, "released by its job, whose processes are gone", RELEASED)
    return verdict, ""


def claim_key(lock: Lock) -> str:
    """Return what the locks of a claim have in common; one without owner is alone."""
    return lock.owner.token if lock.owner else lock.id


def free_locks(node: Node, locks: list[Lock], how: str) -> None:
    """Free devices of one claim, gate held; raise Refusal."""
    record, ids = locks[0].owner, [lock.id for lock in locks]
    assert record is not None
    try:
        grants.release_devices(node.store, record.token, ids, how, node.boot_id)
    except OSError as fault:
        names = " ".join(ids)
        kind = os_error_kind(fault)
        raise Refusal(kind, f"{names} cannot be freed: {fault}", "run gpulock doctor") from fault


def group_by_claim(outcomes: list[ReapOutcome]) -> list[list[ReapOutcome]]:
    """Return what becomes of the locks of each claim."""
    groups: dict[str, list[ReapOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(claim_key(outcome.lock), []).append(outcome)
    return list(groups.values())


class Reaper:
    """One look at a node by which its locks may go: processes and open files.

    `held` are all locks, whose claims explain what is open. The look at open files is taken when
    it is first needed, or by `users_by_device` before the gate.
    """

    def __init__(
        self, node: Node, judge: Judge, devices: "Iterable[Device]", held: dict[str, Lock]
    ) -> None:
        self.node = node
        self.judge = judge
        self.held = held
        self.files = OpenFiles(judge.scan, devices, node.settings)
        # the claim that had each lock, by its token, and whether its job had ended
        self._ahead: "dict[str, tuple[str, int]] | None" = None

    def scan_before_gate(self, uids: "Collection[int]" = ()) -> None:
        """Judge the locks before the gate is taken, so that nobody waits there for these looks.

        A user may have more files open than are looked at in seconds. Under the gate a lock may go
        only if the same claim had it here, and its job has not ended since: what that has left may
        be in no look. What these users have open and started is looked at in any case.
        """
        self.decide(self.held.values())
        for uid in uids:
            self.files.users_by_device(uid)
        for lock in self.held.values():
            if lock.owner and lock.owner.uid in uids:
                self.judge.job_processes(lock)
        whose = {name: lock.owner for name, lock in self.held.items()}
        self._ahead = {n: (one.token, one.draining) if one else ("", 0) for n, one in whose.items()}
        self.judge.scan.scan_closed = True

    def read_locks(self) -> None:
        """Repair and read all locks, with their details; the gate is held. Raises Refusal."""
        self.held = repair_locks(self.node.store, self.node.boot_id)
        self.node.store.read_details(self.held.values())

    def decide(self, locks: "Iterable[Lock]", over: "ClaimEnd" = DIED) -> list[ReapOutcome]:
        """Return what is to become of locks whose claims are `over`; nothing is changed.

        Their details are read anew. Before the gate, which is held briefly: processes and open
        files that were looked at then are not looked at again. A claim is judged once, each
        of its locks then by who has that device open.
        """
        self.node.store.read_details(locks)
        judged: dict[str, tuple[Verdict, str]] = {}
        outcomes: list[ReapOutcome] = []
        for lock in locks:
            claim = claim_key(lock)
            if claim not in judged:
                judged[claim] = judge_claim(lock, self.judge, over)
            verdict, reason = judged[claim]
            act = HELD
            if not reason:
                assert lock.owner is not None
                add_recorded_device(self.files, lock)
                left, unseen = remaining_device_user(lock.id, lock.owner, self.files, self.held)
                reason = left or unseen
                if not reason:
                    act, reason = FREED, verdict.proof
                elif left and over == DIED and lock.owner.scheduler != "process":
                    act, verdict.orphans = ORPHANS, left
                elif over == DIED:
                    verdict = Verdict(ALIVE if left else UNKNOWN, reason)
            outcomes.append(ReapOutcome(lock, act, verdict, reason))
        return outcomes

    def finish(
        self, locks: list[Lock], over: "ClaimEnd" = DIED, how: str = ""
    ) -> list[ReapOutcome]:
        """Decide about locks, free them or note why not; gate held.

        One that cannot be changed stays held, and keeps no other claim from being reaped.
        """
        outcomes = self.decide(locks, over)
        for outcome in outcomes:
            record = outcome.lock.owner
            stage = (record.token, record.draining) if record else ("", 0)
            if self._ahead is not None and self._ahead.get(outcome.lock.id) != stage:
                outcome.act, outcome.reason = HELD, "it was claimed, or its job ended, meanwhile"
        for same in group_by_claim([one for one in outcomes if one.act == FREED]):
            self._free(same, how or f"reap: {same[0].reason}", over)
        for outcome in outcomes:
            if outcome.act != FREED and not outcome.changed:
                self._note_kept(outcome, over)
        return outcomes

    def _free(self, outcomes: list[ReapOutcome], how: str, over: "ClaimEnd") -> None:
        """Free locks of one claim."""
        record, ids = outcomes[0].lock.owner, [one.lock.id for one in outcomes]
        assert record is not None
        try:
            grants.release_devices(self.node.store, record.token, ids, how, self.node.boot_id)
        except Refusal as changed:
            for one in outcomes:
                one.act, one.reason, one.changed = HELD, changed.why, True
        except OSError as fault:
            for one in outcomes:
                one.fail(fault, "changed" if over == DIED else "freed")

    def _note_kept(self, outcome: ReapOutcome, over: "ClaimEnd") -> None:
        """Note in a claim that stays that its job has ended."""
        record = outcome.lock.owner
        try:
            if over == ENDED and record and not record.draining:
                self.node.store.mark_draining(record.token)
        except FileNotFoundError:
            return  # it is another claim's by now
        except OSError as fault:
            outcome.fail(fault, "freed")

    def give_back(self, locks: list[Lock], how: str, over: "ClaimEnd" = GIVEN_BACK) -> None:
        """Free locks that their owner gives back, all or none, gate held; raise Refusal."""
        outcomes = self.decide(locks, over)
        for outcome in outcomes:
            if outcome.act != FREED:
                raise Refusal(BUSY, outcome.reason, "end it first")
        for same in group_by_claim(outcomes):
            free_locks(self.node, [outcome.lock for outcome in same], how)

    def device_user(self, lock: Lock) -> str:
        """Return who has the device of a lock open, as a clause, or nothing."""
        add_recorded_device(self.files, lock)
        if lock.owner is not None:
            left, unseen = remaining_device_user(lock.id, lock.owner, self.files, self.held)
            return left or unseen
        pids = self.files.pids_with_open(lock.id)
        return f"process {pids[0]} has {lock.id} open" if pids else self.files.blind


def make_recorded_device(lock: Lock) -> "Device | None":
    """Return the device of a lock by its record alone; None where that does not tell the node."""
    minor = lock.owner.minor_of(lock.id) if lock.owner else ""
    if not (minor.isascii() and minor.isdigit()):
        return None
    device = Device(lock.id, -1)
    device.minor = int(minor)
    return device


def add_recorded_device(files: OpenFiles, lock: Lock) -> None:
    """Let a look see who has a device open that the node does not show any more.

    A card that fell off the bus is still open, and one whose MIG mode nobody tells any more.
    """
    device = make_recorded_device(lock)
    if device is not None and device.id.partition(SHARE)[0] not in files.ids:
        files.add(device)
