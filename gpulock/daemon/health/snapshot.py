# SPDX-License-Identifier: Apache-2.0
"""One round's look at the health of a node: what the driver shows, what a fresh sample tells."""

from __future__ import annotations

from collections.abc import Mapping

from gpulock.alloc import device_users, reaper
from gpulock.daemon.health import findings, recovery
from gpulock.daemon.health.card_checks import describe_serious
from gpulock.daemon.health.findings import HEALTH, MEMORY, MISSING, XID, HealthFinding
from gpulock.daemon.health.memory import MIB, NOT_KNOWN, judge_memory
from gpulock.daemon.health.recovery import DeviceObservation
from gpulock.daemon.health.state import HealthState
from gpulock.daemon.reconcile.exporter_limit import cards_out_by_exporter
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.devices import card_bus_id, lock_ids_overlap
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.checks import has_passed_command, read_card_checks
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner


class HealthSnapshot:
    """One round's look at a node: the driver's devices, and the sample where it is fresh."""

    def __init__(self, node: Node, report: ReconcileReport, now: float) -> None:
        self.node = node
        self.now = now
        self._report = report
        settings = node.settings
        self._oldest = settings.max_sample_age
        self._sample = sample.read_sample(settings.exporter_dir, now, node.boot_id, self._oldest)
        self._holders: device_users.OpenFiles | None = None
        self._held: dict[str, Lock] = {}

    def cards(self, known: set[str]) -> int:
        """Return how many cards this node has, with those that were here in this boot."""
        here = {device.bus for device in self._report.devices}
        return max(self.node.settings.expected_gpus, len(here | known))

    def reported_devices(self) -> set[str]:
        """Return the devices of this node of which the exporter tells now."""
        here = findings.quarantinable_ids(self._report.devices)
        return {name for name in here if self._fresh(name) is not None}

    def findings(self, wanted: frozenset[str], book: HealthState) -> list[HealthFinding]:
        """Return what speaks against devices; `book.known` learns which cards are here."""
        devices, known = self._report.devices, book.known
        found: list[HealthFinding] = []
        if XID in wanted:
            found += findings.find_hardware_xids(book.xids, devices)
        if self._sample is not None:
            found += findings.findings_from_sample(self._sample, devices, wanted)
        known |= {device.bus for device in devices if not device.fault}
        known |= {
            card_bus_id(outcome.lock.id)
            for outcome in self._report.outcomes
            if outcome.lock.owner and outcome.lock.owner.boot_id == self.node.boot_id
        }
        if HEALTH in wanted:
            found += self.degraded_cards()
        if MISSING in wanted:
            found += findings.find_missing_cards(devices, known)
            found += findings.find_lost_cards(self._sample, devices) if self._sample else []
        return found

    def degraded_cards(self) -> list[HealthFinding]:
        """Return the cards of which a check has failed that concerns every job."""
        checks, _ = read_card_checks(self.node.store.path, self.node.boot_id)
        here = findings.quarantinable_ids(self._report.devices)
        return [
            HealthFinding(bus, HEALTH, HEALTH, 1, why)
            for bus, card in sorted(checks.items())
            if bus in here and (why := describe_serious(card.found))
        ]

    def _fresh(self, name: str) -> sample.DeviceSample | None:
        """Return what a fresh sample of the exporter has of a device."""
        seen = self._sample.devices.get(name) if self._sample else None
        if seen is None or seen.looked is None or self.now - seen.looked > self._oldest:
            return None
        return seen

    def seen(self, name: str) -> sample.DeviceSample:
        """Return what the sample has of a device."""
        return self._fresh(name) or sample.DeviceSample({}, {})

    def memory(self, name: str, since: float = 0.0) -> str:
        """Return whether a device's memory was given back, by a sample newer than `since`."""
        return judge_memory(self._fresh(name), since)

    def make_memory_finding(self, name: str) -> HealthFinding:
        """Return the finding of a device whose memory was not given back."""
        used = (self.seen(name).memory_used or 0) // MIB
        return HealthFinding(name, MEMORY, MEMORY, 1, f"{used} MiB stay in use without a process")

    def is_device_in_use(self, name: str) -> bool:
        """Return whether a process has a device open, or may have: then it is not dirty yet."""
        if self._holders is None:
            judging = make_liveness_judge(self.node)
            self._holders = device_users.OpenFiles(
                judging.scan, self._report.devices, self.node.settings
            )
            self._held = self.node.store.read_all_locks()
            for lock in self._held.values():
                self.node.store.read_details(lock)
        if any(lock_ids_overlap(lock, name) for lock in self._held):
            return True
        pids, locks = self._holders.pids_with_open(name), self._held.values()
        left = device_users.unclaimed_processes(pids, self._holders.scan, locks, Owner())
        return bool(left or self._holders.blind)

    def cards_out(self, notes: Mapping[str, Mapping[str, str]]) -> set[str]:
        """Return the cards that are out of service for what the exporter said."""
        return cards_out_by_exporter(notes, self._report.devices)

    def wants_repair(self, name: str) -> bool:
        """Return whether the exporter says that a device waits for a reset or a repair."""
        seen = self._fresh(name)
        return seen is not None and bool(seen.recovery_action or seen.remap_failure)

    def has_passed_command(self, name: str, note: Mapping[str, str]) -> bool:
        """Return whether HEALTH_COMMAND passed on a card since it was put out, and since a reset.

        It does not count where none is set, nor for what it is never run on: MIG.
        """
        node = self.node
        if not node.settings.health_command or name not in {
            one.bus for one in self._report.devices if not one.parent and not one.withheld
        }:
            return True
        place = node.store.path, node.boot_id, name
        return has_passed_command(*place, recovery.find_test_start(*place, note, self.now))

    def observe_device(self, name: str, bad: bool) -> DeviceObservation:
        """Return what is to be seen of a device that is out."""
        shown = [d for d in self._report.devices if lock_ids_overlap(d.id, name) and not d.fault]
        held = [o for o in self._report.outcomes if o.act != reaper.FREED]
        free = not any(lock_ids_overlap(outcome.lock.id, name) for outcome in held)
        bus = card_bus_id(name)
        return DeviceObservation(
            shown=bool(shown),
            seen=self._fresh(name),
            memory=self.memory(name) if free else NOT_KNOWN,
            bad=bad,
            now=recovery.read_card_start_ids(
                self.node.boot_id, self.node.settings.sys_root, bus, self.node.store.path
            ),
        )
