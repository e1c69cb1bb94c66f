# SPDX-License-Identifier: Apache-2.0
"""What the node can give: which devices are free, and the words when there are too few.

Hot. The gate is held, but for `check_possible`.
"""

import os

from gpulock.alloc.choose import choose
from gpulock.alloc.grant import Want
from gpulock.errors import BROKEN, BUSY, SENSELESS, Refusal
from gpulock.node import devices
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store.counters import Totals, kind_of
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.liveness import Judge
    from gpulock.alloc.reaper import Outcome


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


def settle_held(
    node: Node, found: list[Device], held: dict[str, Lock], judge: "Judge", totals: Totals
) -> None:
    """Free what dead owners hold, because the devices are needed."""
    from gpulock.alloc import reaper

    holders = reaper.make_holders(node, found, judge)
    count_reaps(totals, reaper.settle(node, held, judge, holders))


def in_use(node: Node, found: list[Device], judge: "Judge") -> list[str]:
    """Return the devices that a process has open, asked only after locks were lost."""
    from gpulock.alloc import reaper

    holders = reaper.make_holders(node, found, judge)
    return [d.id for d in found if holders.of(d.id) or holders.blind]


def foreign(node: Node, found: list[Device], count: int, pid: int) -> frozenset[str]:
    """Return the devices that a process, no service nor `pid`, has open; before the gate.

    On a workstation somebody may work without asking. A scheduler's nodes are not looked at: a
    look costs a pass over all open files. Without a choice there is none either. The judge's own
    look at processes must not be as old as this one.
    """
    try:
        taken = os.listdir(node.store.locks_dir)
    except OSError:
        taken = []
    free = [d for d in found if not d.fault and not any([devices.overlaps(d.id, t) for t in taken])]
    if not 0 < count < len(free):
        return frozenset()
    from gpulock.alloc.device_users import Holders
    from gpulock.alloc.liveness import Scan

    settings = node.settings
    services, driver_root = settings.services, settings.driver_root
    try:
        holders = Holders(Scan(node.proc), free, settings.dev_root, services, driver_root)
        return frozenset([d.id for d in free if set(holders.of(d.id)) - {pid}])
    except OSError:
        return frozenset()  # it is a preference, and refuses nobody


def count_reaps(totals: Totals, outcomes: "list[Outcome]") -> None:
    """Count what was freed, by the kind of proof."""
    for outcome in outcomes:
        if outcome.act == "freed":
            totals.add(f"reaped_{kind_of(outcome.verdict.proof)}")


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
    return choose(quiet(free, want), want.count, node.links())


def quiet(free: list[Device], want: Want) -> list[Device]:
    """Return the free devices without those that are taken last, all where too few are left.

    Several are whole cards where there are enough: a busy card is better than an instance too many.
    """
    left = [d for d in free if d.id not in want.last]
    cards, others = [len([d for d in some if not d.parent]) for some in (left, free)]
    whole = want.count == 1 or cards >= want.count or others < want.count
    return left if len(left) >= want.count and whole else free


def short(found: list[Device], held: dict[str, Lock], out: list[str], want: Want) -> Refusal:
    """Return the refusal that says who has the devices."""
    if want.wanted:
        return taken(found, held, out, want)
    count = want.count
    holders = [f"{name_of(d)}: {lock_holder(held, d.id, out)}" for d in found]
    free = len([h for h in holders if h.endswith(": free")])
    good = [d for d in found if not d.fault and not any([devices.overlaps(d.id, o) for o in out])]
    do = "the job can run when others have ended"
    if len(good) < count:
        do = "the job can run when enough are back in service, see gpulock status"
    return Refusal(
        BUSY, f"{asked_for(count)}, {free} of {len(found)} free ({'; '.join(holders)})", do
    )


def taken(found: list[Device], held: dict[str, Lock], out: list[str], want: Want) -> Refusal:
    """Return the refusal of a job that may have certain devices alone."""
    who = [(d, lock_holder(held, d.id, out)) for d in found if d.id in want.wanted]
    gone = [(d, holder) for d, holder in who if holder != "free"]
    names = "; ".join([f"{name_of(d)}: {holder}" for d, holder in gone])
    return Refusal(
        BUSY,
        f"the job has to have GPU {','.join([name_of(d) for d, _ in who])}, not free is {names}",
        f"see gpulock why {name_of(gone[0][0]) if gone else 'JOB'}",
    )


def name_of(device: Device) -> str:
    """Return what names a device among its neighbours: `0`, or `0:gi1.ci0`."""
    if not device.parent:
        return str(device.index)
    return f"{device.index}:{device.id[len(device.bus) + 1 :]}"


def lock_holder(held: dict[str, Lock], device: str, out: list[str]) -> str:
    """Return who has a device, in a word or two."""
    for name, lock in held.items():
        if devices.overlaps(name, device):
            if lock.owner is None:
                return "unknown owner"
            job = lock.owner.job()
            if lock.owner.settling:
                return f"job {job}, which is over, but not its processes"
            return job if lock.owner.scheduler in ("process", "admin") else f"job {job}"
    return "quarantined" if any([devices.overlaps(name, device) for name in out]) else "free"
