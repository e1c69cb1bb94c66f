# SPDX-License-Identifier: Apache-2.0
"""When the next reconcile is due, and which chores follow it. All times are CLOCK_BOOTTIME seconds.

A reconcile is due every 30 s. A change brings it forward, but a burst of changes is one reconcile.
While something is about to be free (a job that ended, whose processes are still going) it is
looked at again after 1, 2, 4, ... seconds. A chore is due when one of its settings is on and
something that concerns it changed; every 30 s TIME changes, for what no file tells.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar, Final

from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.node.context import Node
from gpulock.node.sample import SAMPLE as SAMPLE_FILE
from gpulock.store import events, quarantine
from gpulock.store.verdicts import PERIOD

SETTLING = 0.05  # seconds after a change: an epilog that has just begun is done by then
SPACING = 0.5  # seconds between two reconciles that changes brought forward
FIRST = 1.0  # seconds until something restless is looked at again
INVENTORY_FILE: Final = "inventory"  # in LOCK_DIR, and in the exporter's folder

# what changes, and concerns chores
ROUND: Final = "round"  # with each reconcile
TIME: Final = "time"  # every PERIOD
LOCKS: Final = "locks"  # which stand, whose they are, and what became of them
DEVICES: Final = "devices"  # as the driver shows them
SAMPLE: Final = "sample"  # the exporter's
INVENTORY: Final = "inventory"  # the exporter's, and the one that is published
QUARANTINE: Final = "quarantine"  # the notes of devices that are out of service
EVENTS: Final = "events"  # what became of claims

Due = Mapping[
    str, tuple[str, ...]
]  # by what changed: the settings of which one must be on; (): none


class ReconcileSchedule:
    """`due` is when the next reconcile is; it learns of changes and of reconciles."""

    def __init__(self, now: float) -> None:
        self.due = now
        self._last = now - SPACING
        self._pause = FIRST / 2

    def request_reconcile(self, now: float) -> None:
        """Reconcile soon: something changed."""
        self.due = min(self.due, max(now + SETTLING, self._last + SPACING))

    def record_reconcile(self, now: float, restless: bool) -> None:
        """Note that one is over; `restless`: something it held may be free any moment."""
        self._last = now
        self._pause = min(self._pause * 2, PERIOD) if restless else FIRST / 2
        self.due = now + (self._pause if restless else PERIOD)


class Chore:
    """Something to be done after a reconcile; it may fail, and must not wait.

    `after` says when it is due. A chore that has work between the reconciles sets `due` to when
    that goes on; infinity: never.
    """

    after: ClassVar[Due] = {ROUND: ()}
    due: float = float("inf")

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Do it after a reconcile."""
        raise NotImplementedError

    def run_due(self, now: float) -> None:
        """Go on with it between the reconciles."""

    def close(self) -> None:
        """Let go of what runs: the daemon ends."""


def read_chore_inputs(node: Node, report: ReconcileReport) -> dict[str, object]:
    """Return how that stands which concerns chores, by its name; equal values are no change."""
    settings, store = node.settings, node.store.path
    paths = {
        SAMPLE: [f"{settings.exporter_dir}/{SAMPLE_FILE}"],
        INVENTORY: [f"{settings.exporter_dir}/{INVENTORY_FILE}", f"{store}/{INVENTORY_FILE}"],
        QUARANTINE: [f"{settings.state_dir}/{quarantine.FOLDER}"],
        EVENTS: [f"{store}/{events.NAME}"],
    }
    found: dict[str, object] = {}
    for what, names in paths.items():
        versions: list[tuple[int, int, int]] = []
        for name in names:
            try:
                info = os.stat(name)
                versions.append((info.st_ino, info.st_mtime_ns, info.st_size))
            except OSError:
                versions.append((0, 0, 0))
        found[what] = versions
    found[LOCKS] = [
        (one.lock.id, one.lock.owner.token if one.lock.owner else "", one.act)
        for one in report.outcomes
    ]
    devices = [(d.id, d.uuid, d.minor, d.fault, d.withheld) for d in report.devices]
    found[DEVICES] = devices, report.driver, report.cards
    return found
