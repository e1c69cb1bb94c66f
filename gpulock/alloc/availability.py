# SPDX-License-Identifier: Apache-2.0
"""What the node can give: which devices are free, and the words when there are too few.

Hot. The gate is held to free locks and to pick for a claim; what else asks may be late.
"""

import os

from gpulock.alloc.choose import LATE, SUSPECT, ClaimRequest, choose_unused_first
from gpulock.alloc.holders import (
    BACK_DO,
    ENDED_DO,
    QUARANTINED,
    WITHHELD,
    LastingReason,
    lock_holder,
    usable_devices,
    whole_claims,
)
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, UNKNOWN, Refusal, format_requested_gpus
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device
from gpulock.store import quarantine
from gpulock.store.events import REAPED, note_event
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.liveness import Judge
    from gpulock.alloc.reaper import Reaper
    from gpulock.node.settings import Settings


class ClaimAttempt:
    """A claim at work: for whom, of what, and what was looked at before the gate.

    `devices` are the node's. `ahead` is the look by which locks are freed, None until it is needed.
    """

    def __init__(
        self, node: Node, template: Owner, want: ClaimRequest, make_judge: "Callable[[], Judge]"
    ) -> None:
        self.node = node
        self.template = template
        self.want = want
        self.devices = node.devices()
        self.ahead: "Reaper | None" = None
        self.make_judge = make_judge  # one that looks anew


def impossible_refusal(found: list[Device], want: ClaimRequest, expected: int) -> Refusal:
    """Return the refusal of what the node can never, or not in its present state, grant."""
    if faulty := [d for d in found if d.fault and d.id in want.wanted]:
        # not broken: the other cards work, and gpulockd takes the id out of an RSMAP
        return Refusal(UNKNOWN, f"GPU {faulty[0].label()}: {faulty[0].fault}", "see gpulock status")
    healthy = [d.id for d in found if not d.fault]
    whole = max(expected, len(found))
    asked = format_requested_gpus(want.count)
    if want.count > whole:
        return Refusal(INVALID_REQUEST, f"{asked}, this node has {whole}", "ask for fewer")
    if want.count > len(healthy):
        return Refusal(
            BROKEN,
            f"{asked}, {len(healthy)} of {whole} work",
            "see gpulock status for the missing card",
        )
    missing = next(name for name in want.wanted if name not in healthy)
    return Refusal(INVALID_REQUEST, f"no device {missing} here", "see gpulock status")


def judge_ahead(node: Node, found: list[Device], judge: "Judge", template: Owner) -> "Reaper":
    """Judge every lock, because devices are needed or the job has some; the gate is not held."""
    from gpulock.alloc.reaper import Reaper

    held = node.store.read_all_locks()
    owners = [lock.owner for lock in held.values() if lock.owner]
    reaper = Reaper(node, judge, found, held)
    reaper.judge_ahead({record.uid for record in owners if record.key() == template.key()})
    return reaper


def reap_held_locks(reaper: "Reaper", held: dict[str, Lock]) -> None:
    """Free what dead owners hold, because the devices are needed."""
    from gpulock.alloc.reaper import FREED, reap_locks

    reaper.held = held
    for outcome in reap_locks(reaper):
        if outcome.act == FREED:
            note_event(reaper.node.store.path, REAPED, outcome.verdict.by)


def pick_free_devices(
    node: Node, found: list[Device], held: dict[str, Lock], want: ClaimRequest
) -> tuple[list[Device], dict[str, str]]:
    """Return the devices to lock, nothing when too few are free, and why others are out, by id.

    Out are those that are quarantined, reserved or withheld, and those whose MPS is another's.
    Raises Refusal.
    """
    out: dict[str, str] = {d.id: WITHHELD for d in found if d.withheld}
    state_dir = node.settings.state_dir
    try:
        for name in quarantine.list_note_names(state_dir):
            out[name.removesuffix(quarantine.RESERVE)] = QUARANTINED
    except Refusal as refusal:
        if isinstance(refusal.__cause__, FileNotFoundError):  # the next claim finds them again
            from gpulock.store import boot

            boot.make_claim_folders(node.store, state_dir, node.boot_id)
        raise
    out, last = want.kept | out, want.last
    taken = whole_claims(held) if want.share else {name.partition(SHARE)[0] for name in held}
    free = usable_devices(found, [*taken, *out])
    if suspects := quarantine.read_suspect_cards(state_dir, node.boot_id):
        suspect = [d.id for d in free if d.bus in suspects or d.id in suspects]
        last = last | dict.fromkeys(suspect, SUSPECT)
    if want.wanted:
        free = [d for d in free if d.id in want.wanted]
    if os.access(node.settings.mps_dir, os.F_OK):  # also once SHARES names no card any more
        from gpulock.job.mps import cards_with_mps

        fenced = node.settings.isolation != "off"  # a place would open more through that MPS
        uid = want.uid if want.share and not fenced else None
        closed = cards_with_mps(node.settings, node.boot_id, uid)
        free, out = [d for d in free if d.id not in closed], {**closed, **out}
    if want.share or node.settings.shares:
        from gpulock.alloc.shares import choose_share_places
        from gpulock.node.shares import count_places_by_card

        if want.share:
            return choose_share_places(free, held, want, last, node.settings), out
        shared = count_places_by_card(free, node.settings.shares)
        last = dict.fromkeys(shared, LATE) | last
    if want.kinds:
        from gpulock.alloc.kinds import choose_by_kind

        return choose_by_kind(free, want, last, node.links), out
    return choose_unused_first(free, want.count, last, node.links), out


def shortage_refusal(
    found: list[Device],
    held: dict[str, Lock],
    out: dict[str, str],
    want: ClaimRequest,
    settings: "Settings",
) -> Refusal:
    """Return the refusal that says who has the devices."""
    if want.share and not want.counted:
        from gpulock.alloc.shares import share_shortage_refusal

        return share_shortage_refusal(found, held, out, want, settings)
    if want.wanted:
        in_the_way = whole_claims(held) if want.share else held
        return wanted_device_refusal(found, in_the_way, out, want)
    count, asked = want.count, format_requested_gpus(want.count)
    if want.kinds:
        from gpulock.alloc.kinds import format_requested_kinds
        from gpulock.node.kinds import is_of_kind

        found = [d for d in found if any([is_of_kind(d, kind) for kind, _ in want.kinds])]
        asked = format_requested_kinds(want)
    holders = [d.fault or lock_holder(held, d.id, out) for d in found]
    names = "; ".join([f"{d.label()}: {who or 'free'}" for d, who in zip(found, holders)])
    lasting = [name for name, why in out.items() if isinstance(why, LastingReason)]
    good = usable_devices(found, lasting)
    return Refusal(
        BUSY,
        f"{asked}, {holders.count('')} of {len(found)} free ({names})",
        BACK_DO if len(good) < count else ENDED_DO,
    )


def wanted_device_refusal(
    found: list[Device], held: dict[str, Lock], out: dict[str, str], want: ClaimRequest
) -> Refusal:
    """Return the refusal of a job that may have certain devices alone."""
    who = [(d, lock_holder(held, d.id, out)) for d in found if d.id in want.wanted]
    gone = [(d, holder) for d, holder in who if holder]
    names = "; ".join([f"{d.label()}: {holder}" for d, holder in gone])
    return Refusal(
        BUSY,
        f"the job needs GPU {','.join([d.label() for d, _ in who])}, not free: {names}",
        f"see gpulock why {gone[0][0].label() if gone else 'JOB'}",
    )
