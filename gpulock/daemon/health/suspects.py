# SPDX-License-Identifier: Apache-2.0
"""Cards that the driver lists and does not answer for: told, and taken last by every claim.

Such a card (XID 79, a call that hangs) is still in /proc, so it looks free. Each job that fails on
it at once frees it for the next. With every setting, QUARANTINE_ON empty too, LOCK_DIR/suspects
names it to the claims. The exporter's word is enough: the order of choice harms nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from gpulock.daemon.core.journal import DaemonJournal
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import LOCKS, SAMPLE, TIME, Chore, Due
from gpulock.deadline import clock_boottime
from gpulock.errors import one_line
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store.suspects import read_suspect_cards, write_suspect_cards

LONGEST = 200  # characters of a reason


class SuspectWriter(Chore):
    """The chore; `clock` is CLOCK_BOOTTIME in seconds."""

    after: ClassVar[Due] = dict.fromkeys((SAMPLE, LOCKS, TIME), ())

    def __init__(self, journal: DaemonJournal, clock: Callable[[], float] = clock_boottime) -> None:
        self._journal = journal
        self._clock = clock

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Write what the exporter tells; without its word the last one stands. Raises OSError."""
        settings = node.settings
        told = sample.read_sample(
            settings.exporter_dir, self._clock(), node.boot_id, settings.max_sample_age
        )
        if told is None:
            return
        found = suspect_cards(told, report.devices)
        if found != read_suspect_cards(node.store.path, node.boot_id):
            write_suspect_cards(node.store.path, found, node.boot_id)
        lasting = {
            bus: f"{bus} does not answer: {why}; claims take it last" for bus, why in found.items()
        }
        self._journal.log_changes("suspects", lasting)


def suspect_cards(told: sample.Sample, devices: list[Device]) -> dict[str, str]:
    """Return why each card of this node does not answer, by bus id. Pure."""
    here = {device.bus for device in devices if not device.fault}
    return {
        bus: one_line(why)[:LONGEST] for bus, (_, why) in sorted(told.lost.items()) if bus in here
    }
