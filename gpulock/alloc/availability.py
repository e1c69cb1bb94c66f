# SPDX-License-Identifier: Apache-2.0
"""What the node can give: which devices are free.

Hot. The gate is held to free locks and to pick for a claim; what else asks may be late.
"""

import os

from gpulock.alloc.choose import (
    LAST,
    LATE,
    QUARANTINED,
    WITHHELD,
    ClaimRequest,
    choose_devices,
    usable_devices,
    whole_claims,
)
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.device_list import nvlink_counts
from gpulock.node.devices import SHARE, Device
from gpulock.store import quarantine
from gpulock.store.event_kinds import REAPED
from gpulock.store.events import note_event
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.liveness import Judge
    from gpulock.alloc.reaper import Reaper


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


def scan_before_gate(
    node: Node, devices: list[Device], judge: "Judge", template: Owner
) -> "Reaper":
    """Judge every lock, because devices are needed or the job has some; the gate is not held."""
    from gpulock.alloc.reaper import Reaper

    held = node.store.read_all_locks()
    owners = [lock.owner for lock in held.values() if lock.owner]
    reaper = Reaper(node, judge, devices, held)
    reaper.scan_before_gate({record.uid for record in owners if record.key() == template.key()})
    return reaper


def reap_held_locks(reaper: "Reaper", held: dict[str, Lock]) -> None:
    """Free what dead owners hold, because the devices are needed."""
    from gpulock.alloc.reaper import FREED

    reaper.held = held
    for outcome in reaper.finish([*held.values()]):
        if outcome.act == FREED:
            note_event(reaper.node.store.path, REAPED, outcome.verdict.by)


def pick_free_devices(
    node: Node, devices: list[Device], held: dict[str, Lock], want: ClaimRequest
) -> tuple[list[Device], dict[str, str]]:
    """Return the devices to lock, nothing when too few are free, and why others are out, by id.

    Out are those that are quarantined, reserved or withheld, and those whose MPS is another's.
    Raises Refusal.
    """
    out: dict[str, str] = {d.id: WITHHELD for d in devices if d.withheld}
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
    free = usable_devices(devices, [*taken, *out])
    if suspects := quarantine.read_suspect_cards(state_dir, node.boot_id):
        suspect = [d.id for d in free if d.bus in suspects or d.id in suspects]
        last = last | dict.fromkeys(suspect, LAST)
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
    links = nvlink_counts(node.inventory)
    if want.kinds:
        from gpulock.alloc.kinds import choose_by_kind

        return choose_by_kind(free, want, last, links), out
    return choose_devices(free, want.count, links, last), out
