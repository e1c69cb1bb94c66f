# SPDX-License-Identifier: Apache-2.0
"""Who goes before a caller whose devices are not free, and for how long.

The first caller that waits for other users lets them by and has the free devices that it could
use kept for it in turns, each pair of which is twice as long as the one before, up to
LONGEST_TURN. So a request of any size is served where claims end within that, and keeps at most
half of the time unused.
A caller whom no other user's release would serve lets others by as long as that is so: it waits
for devices of its own user, for ones that are reserved or out of service, or of a dead claim.
"""

from __future__ import annotations

import copy
import time
from functools import cached_property

from gpulock.alloc.availability import pick_free_devices
from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.node_view import read_node_verdicts
from gpulock.alloc.shortage import shortage_refusal
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device
from gpulock.node.kinds import is_of_kind
from gpulock.node.shares import count_places_by_card
from gpulock.store.locks import Lock
from gpulock.store.reservations import read_reservations
from gpulock.store.verdicts import ALIVE, Verdict

FIRST_TURN, LONGEST_TURN = 600.0, 14400.0  # seconds


class QueueView:
    """What one look along the line goes by; `held` are the locks, which most do without."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.now = time.time()
        self.reservations = read_reservations(node.settings.state_dir)
        self.causes: dict[tuple[object, ...], str] = {}  # of `why_yield`, by request

    @cached_property
    def devices(self) -> list[Device]:
        """Return the node's devices, none where the driver shows none: it is asked once."""
        return self.node.devices_if_driver()

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Return what the last reconcile said of each claim, by token."""
        try:
            return read_node_verdicts(self.node, clock_boottime())[0] or {}
        except (Refusal, OSError, ValueError):
            return {}

    @cached_property
    def held(self) -> dict[str, Lock]:
        """Return the locks by id; raise Refusal."""
        return self.node.store.read_detailed_locks()


def find_turn(waited: float) -> tuple[bool, float]:
    """Return whether free devices are kept for the first caller, and for how long that stays so.

    `waited`: seconds for which its user has been the first to wait for others, without a grant.
    """
    turn, left = FIRST_TURN, waited
    while left >= 2 * turn:
        left -= 2 * turn
        turn = min(2 * turn, LONGEST_TURN)
    kept = left >= turn
    return kept, turn * (1 + kept) - left


def find_shortage(view: QueueView, want: ClaimRequest) -> Refusal | None:
    """Return why a request that was refused before would be refused again, None where it may not.

    `want` is as that claim left it: with its user, and its kinds resolved.
    """
    if not {*want.wanted} <= {one.id for one in view.devices}:
        return None  # a claim says that one is gone
    try:
        chosen, out = pick_free_devices(view.node, view.devices, view.held, want)
    except Refusal as refusal:
        return refusal
    settings = view.node.settings
    return None if chosen else shortage_refusal(view.devices, view.held, out, want, settings)


def list_usable_devices(view: QueueView, want: ClaimRequest) -> list[str]:
    """Return the ids of the devices that a request could be granted, whoever has them.

    `want` as for find_shortage.
    """
    usable = [one for one in view.devices if one.id not in want.kept]
    if want.wanted:
        usable = [one for one in usable if one.id in want.wanted]
    if want.kinds:
        usable = [one for one in usable if any(is_of_kind(one, kind) for kind, _ in want.kinds)]
    if want.share:
        return [*count_places_by_card(usable, view.node.settings.shares)]
    return [one.id for one in usable]


DEAD_CLAIMS, RESERVED = "GPUs of dead or unknown claims are locked", "GPUs are reserved"
OWN = "its user holds GPUs"


def why_yield(view: QueueView, want: ClaimRequest) -> str:
    """Return why a request stays refused although all other users gave their devices back.

    Of requests that are alike it is found out once.
    """
    key = want.uid, want.count, want.wanted, want.kinds, want.share, *sorted(want.kept)
    if key not in view.causes:
        view.causes[key] = find_lasting_causes(view, want)
    return view.causes[key]


def find_lasting_causes(view: QueueView, want: ClaimRequest) -> str:
    """Return the same, whatever was found out before."""
    try:
        stay = {name: why_stays(view, lock, want.uid) for name, lock in view.held.items()}
    except Refusal:
        return ""  # the claim says why
    alone = copy.copy(view)
    alone.devices = view.devices
    alone.node = copy.copy(view.node)
    alone.node.settings = copy.copy(view.node.settings)
    alone.node.settings.mps_dir = ""  # an MPS ends with the shares that it is for
    alone.held = {name: view.held[name] for name, why in stay.items() if why}
    if find_shortage(alone, want) is None:
        return ""
    kept = want.kept.keys() & (want.wanted or want.kept)
    causes = {*stay.values(), RESERVED if kept else ""} - {""}
    return " and ".join(sorted(causes)) or "GPUs are out of service"


def why_stays(view: QueueView, lock: Lock, uid: int) -> str:
    """Return why a lock is none that another user would give back, nothing of one that is.

    One without owner nobody would, and a reserve has its note besides.
    """
    if lock.owner is None:
        return DEAD_CLAIMS
    if lock.owner.uid == uid:
        return OWN
    verdict = view.verdicts.get(lock.owner.token)
    return DEAD_CLAIMS if verdict and verdict.state != ALIVE else ""


def count_cards(held: dict[str, Lock], uid: int) -> int:
    """Return how many devices the processes of a user hold; places of a card are one."""
    mine = {
        name.partition(SHARE)[0]
        for name, lock in held.items()
        if lock.owner and lock.owner.scheduler == "process" and lock.owner.uid == uid
    }
    return len(mine)
