# SPDX-License-Identifier: Apache-2.0
"""gpulockd's chore that keeps the ids of this host's RSMAPs in step, by a thread."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Final

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import NOTICE, DaemonJournal
from gpulock.daemon.core.sge_client import ask_qmaster
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import QUARANTINE, TIME, Chore, Due
from gpulock.daemon.slots import rsmap
from gpulock.errors import Refusal
from gpulock.node.context import Node

EVERY: Final = 15.0  # seconds between two rounds


class RsmapSync(Chore):
    """The chore that withdraws ids of cards which no job would get, and restores them."""

    after: ClassVar[Due] = {TIME: ("sge_root",), QUARANTINE: ("sge_root",)}

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self.asking: BackgroundCall[rsmap.SyncResult] | None = None
        self._next = 0.0

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Take the answer of the last round where it is there, and begin one where it is due."""
        asking = self.asking
        if asking is not None:
            if not asking.wait(0.0):
                return
            self.asking = None
            self._report(asking)
        settings = node.settings
        if now < self._next or not settings.sge_root:
            return
        self._next = now + EVERY
        fault = dict[str, str]()
        try:
            host, bad = rsmap.bad_card_ids(node)
            if not any(bad.values()) and not rsmap.load_withdrawn_ids(settings.state_dir):
                host = ""  # a thousand nodes where all is well ask qmaster nothing
        except (Refusal, OSError, ValueError) as reason:
            host, bad = "", {}
            fault["map"] = f"the ids of cards stay as they are: {reason}"
        self._journal.log_changes("sge ids", fault)
        if host:
            ask = partial(ask_qmaster, settings)
            self.asking = BackgroundCall(
                lambda: rsmap.sync_card_ids(settings.state_dir, host, bad, ask)
            )

    def _report(self, asking: BackgroundCall[rsmap.SyncResult]) -> None:
        try:
            result = asking.answer()
        except (Refusal, OSError, ValueError) as fault:
            result = rsmap.SyncResult([], {"round": f"ids at qmaster are not updated: {fault}"})
        for line in result.done:
            self._journal.say(NOTICE, line)
        self._journal.log_changes("sge rsmap", result.wrong)
