# SPDX-License-Identifier: Apache-2.0
"""One round's look at the health of a node: what the driver shows, what a fresh sample tells."""

from __future__ import annotations

from gpulock.alloc import device_users, memory_check, reaper
from gpulock.alloc.memory_check import MIB
from gpulock.daemon.health import findings, recovery
from gpulock.daemon.health.findings import MEMORY, MISSING, Finding
from gpulock.daemon.health.recovery import Sight
from gpulock.daemon.reconcile.reconcile import Report
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.devices import overlaps
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.workstation.process_claims import judge


class Look:
    """One round's look at a node: the driver's devices, and the sample where it is fresh."""

    def __init__(self, node: Node, report: Report, now: float) -> None:
        self.node = node
        self.now = now
        self._report = report
        settings = node.settings
        self._oldest = settings.max_sample_age
        self._sample = sample.read(settings.exporter_dir, now, node.boot_id, self._oldest)
        self._holders: device_users.Holders | None = None
        self._held: dict[str, Lock] = {}

    def cards(self) -> int:
        """Return how many cards this node has."""
        return max(self.node.settings.gpus, len({d.bus for d in self._report.devices}))

    def told(self) -> set[str]:
        """Return the devices of this node of which the exporter tells now."""
        here = findings.names(self._report.devices)
        return {name for name in here if self._fresh(name) is not None}

    def findings(self, wanted: frozenset[str], known: set[str]) -> list[Finding]:
        """Return what speaks against devices; `known` learns which cards are here."""
        devices = self._report.devices
        found: list[Finding] = []
        if self._sample is not None:  # also of a card that answers no more: XID 79 is of such
            found += findings.of_sample(self._sample, devices, wanted)
        known |= {device.bus for device in devices if not device.fault}
        known |= {
            findings.card(outcome.lock.id)
            for outcome in self._report.outcomes
            if outcome.lock.owner and outcome.lock.owner.boot_id == self.node.boot_id
        }
        if MISSING in wanted:
            found += findings.gone(devices, known)
        return found

    def _fresh(self, name: str) -> sample.Seen | None:
        """Return what a fresh look of the exporter's told of a device."""
        seen = self._sample.devices.get(name) if self._sample else None
        if seen is None or seen.looked is None or self.now - seen.looked > self._oldest:
            return None
        return seen

    def seen(self, name: str) -> sample.Seen:
        """Return what was told of a device."""
        return self._fresh(name) or sample.Seen({}, {})

    def memory(self, name: str, quiet: float = 0.0) -> str:
        """Return the hand-over's word for a device's memory, by a look later than `quiet`."""
        settings = self.node.settings
        limit, listing = settings.clean_memory * MIB, settings.process_period
        return memory_check.judge(self._fresh(name), quiet, self.now, self._oldest, limit, listing)

    def dirty(self, name: str) -> Finding:
        """Return the finding of a device whose memory was not given back."""
        used = (self.seen(name).memory_used or 0) // MIB
        return Finding(name, MEMORY, MEMORY, 1, f"{used} MiB stay in use though nobody is there")

    def anybody(self, name: str) -> bool:
        """Return whether a process has a device open, or may have: then it is not dirty yet."""
        if self._holders is None:
            judging = judge(self.node)
            self._holders = reaper.make_holders(self.node, self._report.devices, judging)
            self._held = self.node.store.all()
            for lock in self._held.values():
                self.node.store.read_details(lock)
            judging.attach(self._held)
        if any(overlaps(lock, name) for lock in self._held):
            return True
        return bool(device_users.open_left(name, Owner(), self._holders, self._held))

    def sight(self, name: str, bad: bool) -> Sight:
        """Return what is to be seen of a device that is out."""
        shown = [d for d in self._report.devices if overlaps(d.id, name) and not d.fault]
        held = [o for o in self._report.outcomes if o.act != reaper.FREED]
        free = not any(overlaps(outcome.lock.id, name) for outcome in held)
        bus = findings.card(name)
        return Sight(
            shown=bool(shown),
            seen=self._fresh(name),
            memory=self.memory(name) if free else memory_check.UNTOLD,
            bad=bad,
            now=recovery.facts(self.node.boot_id, self.node.settings.sys_root, bus),
        )
