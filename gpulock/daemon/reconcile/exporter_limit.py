# SPDX-License-Identifier: Apache-2.0
"""How much of a node may be out of service on the exporter's word alone: half of its cards.

The exporter is an ordinary user: a faulty one cannot take a node down (docs/quarantine.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from gpulock.node.devices import Device, card_bus_id
from gpulock.store.quarantine import POLICY

# in a note, by the exporter alone; an XID by the kernel: a driver, or a job, may bring about one of
# every card
EXPORTER_CAUSES: Final = frozenset(("xid", "ecc", "lost", "memory", "health"))
QUARANTINE_LIMIT_REACHED: Final = (
    "more than half of this node is told to be faulty: check it, or quarantine by hand"
)


def note_set_by_exporter(note: Mapping[str, str]) -> bool:
    """Return whether a device is out for what an exporter said."""
    reasons = note.get("reason", "").split("; ")
    return note.get("by") == POLICY and any(
        word.partition(":")[0] in EXPORTER_CAUSES for word in reasons
    )


def cards_out_by_exporter(
    notes: Mapping[str, Mapping[str, str]], found: Iterable[Device]
) -> set[str]:
    """Return the bus ids of what is out of service for what an exporter said: by notes, or MIG."""
    out = {card_bus_id(name) for name, note in notes.items() if note_set_by_exporter(note)}
    return out | {device.bus for device in found if device.withheld}


def may_quarantine_card(bus: str, out: set[str], cards: int) -> bool:
    """Return whether a card may go out too: half of a node's `cards` at most, of one that one."""
    return bus in out or len(out) < max(1, cards // 2)


def limit_exporter_quarantine(found: Collection[str], out: Collection[str], cards: int) -> set[str]:
    """Return the cards that may be out of service on the exporter's word alone.

    It may be mad, or somebody else's by now: half of a node's `cards` at most are `out` for what it
    says, of which `found` are to be the next, in their order; the rest stays in service.
    """
    allowed = {card_bus_id(name) for name in out}
    for name in found:
        if may_quarantine_card(card_bus_id(name), allowed, cards):
            allowed.add(card_bus_id(name))
    return allowed
