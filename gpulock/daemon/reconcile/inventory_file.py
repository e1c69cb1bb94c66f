# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/inventory: what the exporter learned from NVML, as far as the driver confirms it.

The exporter is an ordinary user. A claim relies on what stands here, so each entry is compared
with what the kernel shows of the driver: a card must be there, its UUID must not be another one,
and an instance must have its access file (/proc/driver/nvidia/capabilities). What does not fit is
left out, and said once.

Half of a node's cards at most are out of service on its word, and for XIDs: a faulty one cannot
take a node down (docs/quarantine.md).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from gpulock.daemon.core.journal import DaemonJournal
from gpulock.daemon.reconcile.reconcile import (
    Chore,
    DaemonNode,
    DriverCard,
    ReconcileReport,
)
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.device_list import INVENTORY_LINE, driver_mig_instances
from gpulock.node.devices import Device, card_bus_id
from gpulock.store import atomic, kv, quarantine
from gpulock.store.quarantine import POLICY

INVENTORY_FILE: Final = "inventory"  # in LOCK_DIR, and in the exporter's folder
LIMIT = 1 << 16  # bytes: what a claim reads
_BUS: Final = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]"
_UUID: Final = r"(?:-[0-9A-Za-z]{1,16}){1,5}"
ENTRY: Final = re.compile(
    rf"gpu\.(?P<gpu>{_BUS})\.(?:uuid=GPU{_UUID}|(?:mig|nvswitch)=[01]|memory_mib=[0-9]{{1,8}})"
    rf"|mig\.(?P<parent>{_BUS})\.(?P<instance>gi[0-9]+\.ci[0-9]+)"
    rf"\.(?:uuid=MIG{_UUID}|profile=[ -~]{{,64}}|memory_mib=[0-9]{{1,8}})"
    rf"|link\.(?P<from>{_BUS})\.(?P<to>{_BUS})=[0-9]{{1,8}}"
)
MOST_FAULTS = 20  # things that are wrong; the rest is not told
# for which half of a node may be out: the exporter's word, but XIDs and HEALTH_COMMAND too, which a
# job or a driver may bring about on every card
LIMITED_CAUSES: Final = frozenset(("xid", "ecc", "lost", "health"))
QUARANTINE_LIMIT_REACHED: Final = (
    "more than half of this node is told to be faulty: check it, or quarantine by hand"
)


def check_inventory(
    inventory: Mapping[str, str],
    cards: Mapping[str, DriverCard],
    instances: Mapping[str, frozenset[str]],
    out: frozenset[str] = frozenset(),
    expected: int = 0,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the entries that the driver confirms, and what is wrong with the rest, by key.

    `instances` by bus id are `gi1.ci0`.

    MIG mode without an instance nobody confirms. It takes a card away from jobs, so it is believed
    of half of the node's cards (of `expected`, if they are more) less those that are `out` for one
    of LIMITED_CAUSES.
    """
    pairs, wrong = dict[str, str](), dict[str, str]()
    uuids = [value for key, value in inventory.items() if key.endswith(".uuid")]
    taken = {card.uuid: f"gpu.{bus}.uuid" for bus, card in cards.items()}
    bare = [b for b in cards if inventory.get(f"gpu.{b}.mig") == "1" and not instances.get(b)]
    withheld = limit_quarantine(bare, out, max(expected, len(cards)))
    for key, value in inventory.items():
        entry = ENTRY.fullmatch(f"{key}={value}")
        named = cards_of_entry(entry)
        reason = ""
        if entry is None or not cards.keys() >= set(named):
            reason = "the driver shows no such card" if entry else "not understood"
        elif entry["instance"] and entry["instance"] not in instances.get(named[0], ()):
            reason = "the driver shows no such instance"
        elif key.endswith(".uuid") and (uuids.count(value) > 1 or taken.get(value, key) != key):
            reason = "another device has that UUID"
        elif key == f"gpu.{named[0]}.uuid" and cards[named[0]].uuid not in ("", value):
            reason = f"the driver shows {cards[named[0]].uuid}"
        elif key.endswith(".mig") and named[0] in bare and named[0] not in withheld:
            reason = f"it has no MIG instance, and {QUARANTINE_LIMIT_REACHED}"
        if reason:
            wrong[key] = f"{key}={value[:40]}: {reason}"
        else:
            pairs[key] = value
    for bus in instances:
        # whole, it would be granted beside its own instances
        if instances[bus] and pairs.get(f"gpu.{bus}.mig") != "1":
            pairs[f"gpu.{bus}.mig"] = "1"
            if inventory:
                wrong[f"mig {bus}"] = f"{bus} has MIG instances, but the inventory has none"
    return pairs, wrong


def cards_of_entry(entry: re.Match[str] | None) -> list[str]:
    """Return the bus ids that an entry is about, none where it is not understood."""
    return [bus for bus in entry.group("gpu", "parent", "from", "to") if bus] if entry else []


def read_inventory_file(path: str, boot_id: str) -> tuple[dict[str, str], str]:
    """Return the entries of an inventory of this boot, and what is wrong with the file."""
    try:
        pairs = kv.decode_pairs(atomic.read_text(path, LIMIT), INVENTORY_LINE)
    except FileNotFoundError:
        return {}, ""
    except (OSError, kv.MalformedError) as fault:
        return {}, f"{path}: {fault}"
    return (pairs, "") if pairs.pop("boot_id", "") == boot_id else ({}, "")


def read_cards_out(node: Node, cards: Mapping[str, DriverCard]) -> frozenset[str]:
    """Return the cards that are out for LIMITED_CAUSES; all where that cannot be read."""
    try:
        notes = quarantine.read_device_notes(node.settings.state_dir, quarantine.QUARANTINE)
    except Refusal:
        return frozenset(cards)
    return frozenset(find_limited_cards(notes, ()))


def format_inventory(pairs: Mapping[str, str], boot_id: str) -> str:
    """Return the inventory as it is published."""
    return f"{INVENTORY_LINE}\n{kv.encode_pairs([('boot_id', boot_id), *sorted(pairs.items())])}"


def is_limited_note(note: Mapping[str, str]) -> bool:
    """Return whether the policy put a device out for one of LIMITED_CAUSES."""
    reasons = note.get("reason", "").split("; ")
    return note.get("by") == POLICY and any(
        word.partition(":")[0] in LIMITED_CAUSES for word in reasons
    )


def find_limited_cards(
    notes: Mapping[str, Mapping[str, str]], devices: Iterable[Device]
) -> set[str]:
    """Return the bus ids of what the half counts: out for LIMITED_CAUSES, or withheld for MIG."""
    out = {card_bus_id(name) for name, note in notes.items() if is_limited_note(note)}
    return out | {device.bus for device in devices if device.withheld}


def limit_quarantine(wanted: Collection[str], out: Collection[str], cards: int) -> set[str]:
    """Return the cards that may be out of service for LIMITED_CAUSES.

    These are all that are `out`, and of `wanted`, in their order, as many as make half of a node's
    `cards`, of one that one: an exporter may be mad, or somebody else's by now.
    """
    allowed = {card_bus_id(name) for name in out}
    new = dict.fromkeys(bus for bus in map(card_bus_id, wanted) if bus not in allowed)
    return allowed | {*[*new][: max(0, max(1, cards // 2) - len(allowed))]}


class InventoryPublisher(Chore):
    """The chore that publishes the inventory, and says once what is wrong with the exporter's."""

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal

    def run(self, node: DaemonNode, report: ReconcileReport, now: float) -> None:
        """Publish what can be; raise OSError.

        Without the exporter's file what was published is checked again: an instance may have gone
        meanwhile, which is no fault. Where the driver shows no card nothing can be checked.
        """
        if not node.cards:
            return
        place, settings = f"{node.store.path}/{INVENTORY_FILE}", node.settings
        before, _ = read_inventory_file(place, node.boot_id)
        inventory, fault = read_inventory_file(
            f"{settings.exporter_dir}/{INVENTORY_FILE}", node.boot_id
        )
        instances = {
            bus: driver_mig_instances(settings.driver_root, card.minor)
            for bus, card in node.cards.items()
        }
        out = read_cards_out(node, node.cards)
        pairs, wrong = check_inventory(
            inventory or before, node.cards, instances, out, settings.expected_gpus
        )
        lines = {"file": fault} if fault else {}
        text = format_inventory(pairs, node.boot_id).encode("utf-8", "surrogateescape")
        if len(text) > LIMIT:
            lines["size"] = f"the inventory of the exporter is longer than {LIMIT} bytes"
        elif pairs != before:
            atomic.replace_file(place, text)
        lines.update([*wrong.items()][: MOST_FAULTS if inventory else 0])
        lines = {key: f"left out of the inventory: {why}" for key, why in lines.items()}
        self._journal.log_changes("inventory", lines)
