# SPDX-License-Identifier: Apache-2.0
"""Claim devices for one job, all or none; release them by owner.

Hot. The order of the steps is the design's section 4: after a crash at any instruction there is
no lock, a lock without owner, or whole locks of a job that never starts. No instruction leaves a
device granted twice, because mkdir is the grant.
"""

import os
import time

from gpulock import boot, devices, owner, quarantine
from gpulock.choose import choose
from gpulock.deadline import Deadline, boottime
from gpulock.devices import Device
from gpulock.gate import Gate
from gpulock.locks import Lock
from gpulock.node import Node
from gpulock.owner import Owner
from gpulock.refusal import BROKEN, BUSY, SENSELESS, UNKNOWN, GateShutError, Refusal
from gpulock.totals import Totals, note_timeout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.liveness import Judge
    from gpulock.settle import Outcome


class Want:
    """What is asked for: `count` devices, of `wanted` ids alone where there are some.

    `join`: a task may share what its job holds here already.
    """

    __slots__ = ("count", "join", "wanted")

    def __init__(self, count: int, wanted: tuple[str, ...], join: bool) -> None:
        self.count = count
        self.wanted = wanted
        self.join = join


class Grant:
    """The devices of a job, by index, with the record that holds them.

    `fresh` is False when the same run asked again and got the same answer. `waited` is the time
    at the gate in seconds.
    """

    __slots__ = ("devices", "fresh", "owner", "waited")

    def __init__(self, granted: list[Device], record: Owner, fresh: bool, waited: float) -> None:
        self.devices = granted
        self.owner = record
        self.fresh = fresh
        self.waited = waited


def claim(
    node: Node,
    template: Owner,
    count: int,
    judge: "Callable[[], Judge]",
    deadline: Deadline,
    wanted: tuple[str, ...] = (),
    join: bool = False,
) -> Grant:
    """Lock `count` devices (or exactly `wanted`) for the owner that `template` describes.

    `judge` is called only when something must be settled. With `join`, a task of a job that
    holds devices here shares them. Raises Refusal.
    """
    want = Want(count, wanted, join)
    judge = once(judge)
    found = node.devices()
    check_possible(found, want, node.settings.gpus)
    boot.create(node.store)
    node.store.check()
    try:
        with Gate(node.store.path, deadline.sooner(node.settings.gate_timeout)) as gate:
            totals = Totals(node.store)
            try:
                boot.make_ready(node.store, node.settings.state_dir, node.boot_id, node.name)
                grant = claim_gated(node, found, template, want, judge, totals)
            except Refusal as refusal:
                note_refusal(totals, refusal, template, gate.waited)
                raise
            grant.waited = gate.waited
            totals.granted(gate.waited)
            totals.save()
            return grant
    except GateShutError:
        note_timeout(node.store)
        raise


def once(make: "Callable[[], Judge]") -> "Callable[[], Judge]":
    """Return `make` so that it is called at most once: one look at /proc serves a whole claim."""
    made: list[Judge] = []

    def judge() -> "Judge":
        if not made:
            made.append(make())
        return made[0]

    return judge


def note_refusal(totals: Totals, refusal: Refusal, template: Owner, waited: float) -> None:
    """Count a refusal; a streak of unknowns means that the node is broken, not the jobs."""
    if refusal.kind == UNKNOWN and totals.streak(template.job(), template.uid):
        refusal.kind = BROKEN
        refusal.why += " (for several jobs in a row)"
    totals.refused(refusal.kind, waited)
    totals.save()


def note_unknown(node: Node, refusal: Refusal, template: Owner, deadline: Deadline) -> None:
    """Count an unknown that was met before the gate; may turn the refusal into BROKEN."""
    try:
        node.store.check()
        with Gate(node.store.path, deadline.sooner(node.settings.gate_timeout)) as gate:
            note_refusal(Totals(node.store), refusal, template, gate.waited)
    except (Refusal, OSError):
        return  # the first refusal is the one to tell


def check_possible(found: list[Device], want: Want, expected: int) -> None:
    """Raise Refusal when the node can never, or not in its present state, grant so much."""
    healthy = [d.id for d in found if not d.fault]
    whole = max(expected, len(found))
    if len(healthy) >= want.count:
        missing = [name for name in want.wanted if name not in healthy]
        if missing:
            raise Refusal(SENSELESS, f"no device {missing[0]} here", "see gpulock status")
        return
    asked = asked_for(want.count)
    if want.count <= whole:
        raise Refusal(
            BROKEN,
            f"{asked}, {len(healthy)} of {whole} work",
            "see gpulock status for the missing card",
        )
    raise Refusal(SENSELESS, f"{asked}, this node has {whole}", "ask for fewer")


def asked_for(count: int) -> str:
    """Return how many GPUs are asked for, in words."""
    return "1 GPU asked for" if count == 1 else f"{count} GPUs asked for"


def claim_gated(
    node: Node,
    found: list[Device],
    template: Owner,
    want: Want,
    judge: "Callable[[], Judge]",
    totals: Totals,
) -> Grant:
    """Do steps 4 to 7 of the life of a claim; the gate is held."""
    held = node.store.all()
    mine = [lock for lock in held.values() if lock.owner and lock.owner.key() == template.key()]
    if mine:
        again = same_grant(mine, template, want.count, found)
        if again is None and want.join:
            again = join_grant(node, mine, template, found, judge())
        if again:
            return again
        give_up_earlier(node, mine, template, found, judge())
        held = node.store.all()
    out = quarantine.listed(node.settings.state_dir, quarantine.QUARANTINE)
    if boot.was_lost(node.store):
        out = [*out, *in_use(node, found, judge())]
    chosen = pick(node, found, held, out, want)
    if not chosen:
        settle_held(node, found, held, judge(), totals)
        held = node.store.all()
        chosen = pick(node, found, held, out, want)
    if not chosen:
        raise short(found, held, out, want.count)
    return lock_all(node, chosen, template)


def same_grant(mine: list[Lock], template: Owner, count: int, found: list[Device]) -> Grant | None:
    """Return the grant this very run has already, if it is whole and not being released."""
    record = mine[0].owner
    assert record is not None
    granted = whole_grant(mine, found)
    same = (record.uid, record.run(), record.boot_id, record.settling) == (
        template.uid,
        template.run(),
        template.boot_id,
        0,
    )
    return Grant(granted, record, False, 0.0) if len(granted) == count and same else None


def whole_grant(mine: list[Lock], found: list[Device]) -> list[Device]:
    """Return the devices of a grant that is whole: one token, every device locked and there."""
    record = mine[0].owner
    assert record is not None
    ids = {lock.id for lock in mine if lock.owner and lock.owner.token == record.token}
    granted = [d for d in found if d.id in ids]
    whole = ids == set(record.devices) and len(ids) == len(mine) == len(granted)
    return granted if whole else []


def join_grant(
    node: Node, mine: list[Lock], template: Owner, found: list[Device], judge: "Judge"
) -> Grant | None:
    """Let a task share what its job holds here, while that job lives: its shepherd is an anchor.

    None where there is no whole, living grant.
    """
    record = mine[0].owner
    assert record is not None
    granted = whole_grant(mine, found)
    if not granted or record.uid != template.uid or record.settling:
        return None
    for lock in mine:
        node.store.read_details(lock)
        if judge.verdict(lock).state != "alive":
            return None
    try:
        for lock in mine:
            node.store.anchor(lock.id, template.pid, template.start, template.add_grp_id)
    except OSError as fault:
        raise Refusal(BROKEN, f"a lock cannot be joined: {fault}", "look at LOCK_DIR") from fault
    return Grant(granted, record, False, 0.0)


def give_up_earlier(
    node: Node, mine: list[Lock], template: Owner, found: list[Device], judge: "Judge"
) -> None:
    """Free what an earlier run of the job, or a cut-short claim of this one, left; or refuse."""
    from gpulock import guard, settle

    holders = settle.make_holders(node, found, judge)
    others = settle.groups(node.store.all())
    for lock in mine:
        record = lock.owner
        assert record is not None
        node.store.read_details(lock)
        if record.run() == template.run() and record.boot_id == template.boot_id:
            left = guard.group_left(lock, judge.scan)
            left = left or guard.open_left(lock.id, record, holders, others)
            if not left:
                retire(node, lock, "claim: this run's claim was cut short")
                continue
        else:
            outcome = settle.settle_one(node, lock, judge, holders, others, False)
            if outcome.act == settle.FREED:
                continue
            left = outcome.reason
        raise Refusal(
            BUSY, f"{lock.id} is still held by an earlier run: {left}", f"see gpulock why {lock.id}"
        )


def settle_held(
    node: Node, found: list[Device], held: dict[str, Lock], judge: "Judge", totals: Totals
) -> None:
    """Free what dead owners hold, because the devices are needed."""
    from gpulock import settle

    holders = settle.make_holders(node, found, judge)
    count_reaps(totals, settle.settle(node, held, judge, holders))


def in_use(node: Node, found: list[Device], judge: "Judge") -> list[str]:
    """Return the devices that a process has open, asked only after locks were lost."""
    from gpulock import settle

    holders = settle.make_holders(node, found, judge)
    return [d.id for d in found if holders.of(d.id) or holders.blind]


def count_reaps(totals: Totals, outcomes: "list[Outcome]") -> None:
    """Count what was freed, by the kind of proof."""
    for outcome in outcomes:
        if outcome.act == "freed":
            record = outcome.lock.owner
            totals.add(f"reaped_{record.scheduler if record else 'cut_short'}")


def pick(
    node: Node,
    found: list[Device],
    held: dict[str, Lock],
    out: list[str],
    want: Want,
) -> list[Device]:
    """Return the devices to lock, or nothing when there are too few free ones."""
    taken = [*held, *out]
    free = [d for d in found if not d.fault and not any([devices.overlaps(d.id, t) for t in taken])]
    if want.wanted:
        free = [d for d in free if d.id in want.wanted]
    return choose(free, want.count, node.links())


def short(found: list[Device], held: dict[str, Lock], out: list[str], count: int) -> Refusal:
    """Return the refusal that says who has the devices."""
    holders = [f"{d.index}: {lock_holder(held, d.id, out)}" for d in found]
    free = len([h for h in holders if h.endswith(": free")])
    return Refusal(
        BUSY,
        f"{asked_for(count)}, {free} of {len(found)} free ({'; '.join(holders)})",
        "the job can run when others have ended",
    )


def lock_holder(held: dict[str, Lock], device: str, out: list[str]) -> str:
    """Return who has a device, in a word or two."""
    for name, lock in held.items():
        if devices.overlaps(name, device):
            return f"job {lock.owner.job()}" if lock.owner else "unknown owner"
    return "quarantined" if any([devices.overlaps(name, device) for name in out]) else "free"


def lock_all(node: Node, chosen: list[Device], template: Owner) -> Grant:
    """Make every lock, or none: what was made is undone newest first, then the error rises."""
    record = template.copy(
        token=os.urandom(8).hex(),
        devices=tuple([d.id for d in chosen]),
        claimed_at=time.time(),
        claimed_boottime=boottime(),
    )
    made: list[str] = []
    try:
        owner.encode(record)
        for device in chosen:
            made.append(device.id)
            node.store.make(device.id, record.copy(uuid=device.uuid))
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


def retire(node: Node, lock: Lock, how: str) -> None:
    """Free one lock; translate a failing file system."""
    try:
        node.store.retire(lock, how)
    except OSError as fault:
        raise Refusal(BROKEN, f"{lock.id} cannot be freed: {fault}", "look at LOCK_DIR") from fault
