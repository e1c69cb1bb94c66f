# SPDX-License-Identifier: Apache-2.0
"""What gpulock's own files say of a node at one moment, and the state of each device by that.

Hot. The one builder for `gpulock status` and the load sensor. The exporter keeps what it read of a
file while that cannot be read (state.local_state). For all of them alloc.states judges.
Nothing is written and no gate is taken.
"""

import os
import time

from gpulock.alloc.states import NodeView
from gpulock.errors import BUSY, Refusal
from gpulock.node.context import Node
from gpulock.store import boot, verdicts
from gpulock.store.quarantine import QUARANTINE, note_reason, read_device_notes
from gpulock.store.verdicts import Verdict


def read_node_view(node: Node, now: float) -> NodeView:
    """Return what the files say at `now` (CLOCK_BOOTTIME seconds); raise Refusal.

    Verdicts that cannot be read are not known.
    """
    view = NodeView()
    try:
        view.lost = find_lost_records(node)
    except Refusal as refusal:
        view.fault = refusal.why
    unreadable: dict[str, str] = {}
    view.locks = node.store.read_detailed_locks(unreadable)
    for token, why in unreadable.items():
        view.fault = f"the record of claim {token} cannot be read: {why}"
    view.full = boot.is_full(node.store.path)
    notes = read_device_notes(node.settings.state_dir, QUARANTINE)
    view.quarantined = {name: note_reason(note) for name, note in notes.items()}
    view.closed = read_closed_cards(node)
    note_reservations(node, view)
    try:
        view.verdicts, view.reconciled = read_node_verdicts(node, now)
    except Refusal as refusal:
        view.fault = refusal.why
    except (OSError, ValueError):
        pass
    return view


def find_lost_records(node: Node) -> "Refusal | None":
    """Return the refusal of every claim where records of this boot were lost; raise Refusal."""
    state_dir = node.settings.state_dir
    if not os.path.isdir(state_dir) or node.store.boot_id() == node.boot_id:
        return None
    return boot.lost_records_refusal(node.store, state_dir, node.boot_id)


def note_reservations(node: Node, view: NodeView) -> None:
    """Note in the view which devices users have reserved, for now and for later."""
    if not node.settings.user_claims:
        return
    from gpulock.store.reservations import find_reserved_devices, read_reservations

    now = time.time()
    every = [one for one in read_reservations(node.settings.state_dir) if now < one.end]
    view.reservations = sorted(every, key=lambda one: one.begin)
    view.reserved = find_reserved_devices(every, now)


def read_closed_cards(node: Node) -> dict[str, str]:
    """Return why each card that has an MPS is closed, once no place of it is held; by bus id."""
    if not os.access(node.settings.mps_dir, os.F_OK):
        return {}
    from gpulock.job.mps import cards_with_mps

    return cards_with_mps(node.settings, node.boot_id, None)


def check_no_mps_ends(node: Node, cards: list[str]) -> None:
    """Raise Refusal(BUSY) where the MPS of the last places of a card still runs: nobody has it."""
    closed = read_closed_cards(node)
    for card in [card for card in cards if card in closed]:
        do = "wait for its end; gpulock doctor says more"
        raise Refusal(BUSY, f"{card} is not free: {closed[card]}", do)


def read_node_verdicts(node: Node, now: float) -> "tuple[dict[str, Verdict] | None, float | None]":
    """Return the verdicts where they are fresh, and when the last reconcile of this boot was.

    Raises OSError, ValueError or Refusal.
    """
    if node.store.boot_id() != node.boot_id:
        return None, None
    return verdicts.read_dated_verdicts(node.store.path, now, node.boot_id)
