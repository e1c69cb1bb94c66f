# SPDX-License-Identifier: Apache-2.0
"""Cards that do not answer, or degrade each job: told, and taken last by every claim.

Such a card (XID 79, a call that hangs) is still in /proc, so it looks free. Each job that fails on
it at once frees it for the next. With every setting, QUARANTINE_ON empty too, LOCK_DIR/suspects
names it to the claims. So it names a card of which a check has failed that concerns every job
(card_checks.SERIOUS). The exporter's word is enough: the order of choice harms nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import ClassVar

from gpulock.daemon.core.journal import DaemonJournal
from gpulock.daemon.health.card_checks import describe_serious
from gpulock.daemon.health.findings import read_lost_cards
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import LOCKS, SAMPLE, TIME, Chore, Due
from gpulock.deadline import clock_boottime
from gpulock.errors import one_line
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.store import atomic, kv
from gpulock.store.checks import read_card_checks
from gpulock.store.quarantine import SUSPECTS, SUSPECTS_LINE, read_suspect_cards

LONGEST = 200  # characters of a reason
PERIOD = 3.0  # seconds between two readings of the sample


class SuspectWriter(Chore):
    """The chore; `clock` is CLOCK_BOOTTIME in seconds."""

    after: ClassVar[Due] = dict.fromkeys((SAMPLE, LOCKS, TIME), ())

    def __init__(self, journal: DaemonJournal, clock: Callable[[], float] = clock_boottime) -> None:
        self._journal = journal
        self._clock = clock
        self._seen: tuple[Node, ReconcileReport] | None = None

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Write what the exporter tells; raise OSError."""
        self._seen = node, report
        self.run_due(now)

    def run_due(self, now: float) -> None:
        """Write what the exporter tells; without its word the last one stands. Raises OSError."""
        self.due = now + PERIOD
        if self._seen is None:
            return
        node, report = self._seen
        settings = node.settings
        told = sample.read_sample(
            settings.exporter_dir, self._clock(), node.boot_id, settings.max_sample_age
        )
        if told is None:
            return
        checks, _ = read_card_checks(node.store.path, node.boot_id)
        poor = {bus: describe_serious(card.found) for bus, card in checks.items()}
        cards = f"{settings.driver_root}/gpus"
        lost = {
            bus: why
            for bus, why in read_lost_cards(told, report.devices).items()
            if os.path.lexists(f"{cards}/{bus}")
        }
        found = {bus: one_line(why)[:LONGEST] for bus, why in {**poor, **lost}.items() if why}
        if found != read_suspect_cards(node.store.path, node.boot_id):
            write_suspect_cards(node.store.path, found, node.boot_id)
        lasting = {
            bus: f"{bus} does not answer: {why[:LONGEST]}; claims take it last"
            for bus, why in lost.items()
        }
        self._journal.log_changes("suspects", lasting)


def write_suspect_cards(lock_dir: str, found: Mapping[str, str], boot_id: str) -> None:
    """Replace why each card is suspect, by bus id; without any the file goes. Raises OSError."""
    path = f"{lock_dir}/{SUSPECTS}"
    if found:
        text = f"{SUSPECTS_LINE}\n{kv.encode_pairs([('boot_id', boot_id), *sorted(found.items())])}"
        atomic.replace_file(path, text.encode("utf-8", "replace"))
    else:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
