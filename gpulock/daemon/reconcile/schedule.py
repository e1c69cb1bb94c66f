# SPDX-License-Identifier: Apache-2.0
"""When the next reconcile is due, and what follows it. All times are CLOCK_BOOTTIME seconds.

A reconcile is due every 30 s. A change brings it forward, but a burst of changes is one reconcile.
While something is about to be free (a job that ended, whose processes are still going) it is
looked at again after 1, 2, 4, ... seconds. All chores follow each reconcile: together they take as
long as it does, and to find out what has changed for which of them takes no less.
"""

from __future__ import annotations

from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.node.context import Node
from gpulock.store.verdicts import PERIOD

SETTLING = 0.05  # seconds after a change: an epilog that has just begun is done by then
SPACING = 0.5  # seconds between two reconciles that changes brought forward
FIRST = 1.0  # seconds until something restless is looked at again


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
    """Something to be done after each reconcile; it may fail, and must not wait.

    A chore that has work between the reconciles sets `due` to when that goes on; infinity: never.
    """

    due: float = float("inf")

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Do it after a reconcile."""
        raise NotImplementedError

    def run_due(self, now: float) -> None:
        """Go on with it between the reconciles."""

    def close(self) -> None:
        """Let go of what runs: the daemon ends."""
