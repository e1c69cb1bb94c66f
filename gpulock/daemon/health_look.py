# SPDX-License-Identifier: Apache-2.0
"""One round's look at the health of a node: what the driver shows, what a fresh sample tells."""

from __future__ import annotations

from gpulock import guard, handover, sample, settle
from gpulock.daemon import health_back, health_find
from gpulock.daemon.health_back import Sight
from gpulock.daemon.health_find import MEMORY, MISSING, Finding
from gpulock.daemon.process import judge
from gpulock.daemon.reconcile import Report
from gpulock.devices import overlaps
from gpulock.handover import MIB
from gpulock.locks import Lock
from gpulock.node import Node
from gpulock.owner import Owner


class Look:
    """One round's look at a node: the driver's devices, and the sample where it is fresh."""

    def __init__(self, node: Node, report: Report, now: float) -> None:
        self.node = node
        self.now = now
        self._report = report
        settings = node.settings
        self._oldest = settings.max_sample_age
        self._sample = sample.read(settings.exporter_dir, now, node.boot_id, self._oldest)
        self._holders: guard.Holders | None = None
        self._held: dict[str, Lock] = {}

    def cards(self) -> int:
        """Return how many cards this node has."""
        return max(self.node.settings.gpus, len({d.bus for d in self._report.devices}))

    def told(self) -> set[str]:
        """Return the devices of this node of which the exporter tells now."""
        here = health_find.names(self._report.devices)
        return {name for name in here if self._fresh(name) is not None}

    def findings(self, wanted: frozenset[str], known: set[str]) -> list[Finding]:
        """Return what speaks against devices; `known` learns which cards are here."""
        devices = self._report.devices
        found: list[Finding] = []
        if self._sample is not None:  # also of a card that answers no more: XID 79 is of such
            found += health_find.of_sample(self._sample, devices, wanted)
        known |= {device.bus for device in devices if not device.fault}
        known |= {
            health_find.card(outcome.lock.id)
            for outcome in self._report.outcomes
            if outcome.lock.owner and outcome.lock.owner.boot_id == self.node.boot_id
        }
        if MISSING in wanted:
            found += health_find.gone(devices, known)
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
        return handover.judge(self._fresh(name), quiet, self.now, self._oldest, limit, listing)

    def dirty(self, name: str) -> Finding:
        """Return the finding of a device whose memory was not given back."""
        used = (self.seen(name).memory_used or 0) // MIB
        return Finding(name, MEMORY, MEMORY, 1, f"{used} MiB stay in use though nobody is there")

    def anybody(self, name: str) -> bool:
        """Return whether a process has a device open, or may have: then it is not dirty yet."""
        if self._holders is None:
            judging = judge(self.node)
            self._holders = settle.make_holders(self.node, self._report.devices, judging)
            self._held = self.node.store.all()
            for lock in self._held.values():
                self.node.store.read_details(lock)
            judging.attach(self._held)
        if any(overlaps(lock, name) for lock in self._held):
            return True
        return bool(guard.open_left(name, Owner(), self._holders, self._held))

    def sight(self, name: str, bad: bool) -> Sight:
        """Return what is to be seen of a device that is out."""
        shown = [d for d in self._report.devices if overlaps(d.id, name) and not d.fault]
        held = [o for o in self._report.outcomes if o.act != settle.FREED]
        free = not any(overlaps(outcome.lock.id, name) for outcome in held)
        bus = health_find.card(name)
        return Sight(
            shown=bool(shown),
            seen=self._fresh(name),
            memory=self.memory(name) if free else handover.UNTOLD,
            bad=bad,
            now=health_back.facts(self.node.boot_id, self.node.settings.sys_root, bus),
        )
