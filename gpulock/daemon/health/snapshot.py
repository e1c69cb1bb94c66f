# SPDX-License-Identifier: Apache-2.0
"""One round's look at the health of a node: what the driver shows, what a fresh sample tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpulock.alloc import reaper
from gpulock.daemon.core import sample
from gpulock.daemon.health import findings, recovery
from gpulock.daemon.health.cards import NodeCards
from gpulock.daemon.health.findings import HEALTH, HealthFinding
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import card_bus_id, lock_ids_overlap
from gpulock.store import quarantine


def read_fresh_sample(node: Node, now: float) -> sample.Sample | None:
    """Return what the exporter tells, None where it told nothing for a while."""
    settings = node.settings
    return sample.read_sample(settings.exporter_dir, now, node.boot_id, settings.max_sample_age)


class HealthSnapshot:
    """One round's look at a node: the driver's devices, and the sample where it is fresh."""

    def __init__(self, node: Node, report: ReconcileReport, now: float, cards: NodeCards) -> None:
        self.node, self.now, self.cards = node, now, cards
        self.devices = report.devices
        self.here = findings.quarantinable_ids(self.devices)
        self._claims = [one.lock for one in report.outcomes]
        self._held = [one.lock.id for one in report.outcomes if one.act != reaper.FREED]
        self.sample = read_fresh_sample(node, now)
        self.fresh = {
            name: seen
            for name, seen in (self.sample.devices.items() if self.sample else ())
            if name in self.here
            and seen.looked is not None
            and now - seen.looked <= node.settings.max_sample_age
        }

    def count_cards(self) -> int:
        """Return how many cards this node has, with those that were here in this boot."""
        here = {device.bus for device in self.devices}
        return max(self.node.settings.expected_gpus, len(here | self.cards.known))

    def is_free(self, name: str) -> bool:
        """Return whether nobody holds a device, by the reconcile."""
        return not any(lock_ids_overlap(one, name) for one in self._held)

    def find_all(self) -> Iterator[HealthFinding]:
        """Yield what speaks against devices; `known` learns which cards are here."""
        devices, known = self.devices, self.cards.known
        yield from findings.find_hardware_xids(self.cards, devices)
        known |= {device.bus for device in devices if not device.fault}
        known |= {
            card_bus_id(lock.id)
            for lock in self._claims
            if lock.owner and lock.owner.boot_id == self.node.boot_id
        }
        yield from findings.find_missing_cards(devices, known)
        if self.sample is not None:
            yield from findings.findings_from_sample(self.sample, devices)
        for name, state in sorted(self.cards.states.items()):
            if name in self.here and (why := state.describe_failed()):
                yield HealthFinding(name, HEALTH, HEALTH, 1, why)

    def has_passed_command(self, name: str, note: Mapping[str, str]) -> bool:
        """Return whether HEALTH_COMMAND passed on a card since it went out and was started again.

        It does not count where none is set, nor for what it is never run on: MIG.
        """
        if not self.node.settings.health_command or name not in {
            one.bus for one in self.devices if not one.parent and not one.withheld
        }:
            return True
        return self.cards.of(name).has_passed(recovery.test_since(note, self.cards))

    def is_shown(self, name: str) -> bool:
        """Return whether the driver shows a device, and can read it."""
        return any(lock_ids_overlap(one.id, name) and not one.fault for one in self.devices)


def read_quarantine_notes(node: Node) -> dict[str, dict[str, str]]:
    """Return what is out of service, by id; nothing where that cannot be seen."""
    try:
        return quarantine.read_device_notes(node.settings.state_dir, quarantine.QUARANTINE)
    except Refusal:
        return {}
