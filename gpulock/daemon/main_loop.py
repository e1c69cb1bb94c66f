# SPDX-License-Identifier: Apache-2.0
"""gpulockd itself: rounds when they are due, between them it sleeps.

The service manager hears of us only as the loop goes round: a round that hangs is a watchdog's.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpulock.alloc.reaper import FREED
from gpulock.daemon.core.journal import ERROR, INFO, Journal
from gpulock.daemon.core.loop import Loop
from gpulock.daemon.core.notify import Notify
from gpulock.daemon.core.signals import Signals
from gpulock.daemon.reconcile.driver import DaemonNode
from gpulock.daemon.reconcile.lock_watch import Watch
from gpulock.daemon.reconcile.owner_watch import Owners
from gpulock.daemon.reconcile.reconcile import Report
from gpulock.daemon.reconcile.schedule import Pace
from gpulock.daemon.rounds import Chore, Rounds, restless
from gpulock.deadline import boottime
from gpulock.errors import Refusal
from gpulock.node.settings import Settings, load
from gpulock.store.verdicts import PERIOD
from gpulock.workstation.serve_policy import Serving
from gpulock.workstation.server import Server


class Daemon:
    """One gpulockd, from its settings to the signal that ends it."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        notify: Notify,
        signals: Signals,
        chores: Sequence[Chore],
    ) -> None:
        self.rounds = Rounds(DaemonNode(settings), journal, chores)
        self.loop = Loop()
        self.pace = Pace(boottime())
        self._owners = Owners(self.loop, self._wanted)
        self._watch = Watch()
        self._server = Server(self.loop, journal, lambda: self.rounds.node)
        self._serving = Serving()
        self._journal = journal
        self._notify = notify
        self._signals = signals
        self._status = ""

    def run(self) -> None:
        """Go round until a signal ends it; raise RunsAlreadyError."""
        try:
            self._go()
        finally:  # an alarm may end a round that hangs, at any instruction
            self.rounds.close()

    def _go(self) -> None:
        self.loop.watch(self._signals.fd, self._signals.drain)
        if self._watch.fd >= 0:
            self.loop.watch(self._watch.fd, self._look)
        self._round()
        self._notify.ready(self.rounds.summary)
        while not self._signals.ending:
            self._notify.alive(boottime())
            if self._signals.reload:
                self._reload()
            self.loop.wait(self._until())
            if boottime() >= self.pace.due and not self._signals.ending:
                self._round()
            if not self._signals.ending:
                self.rounds.turn(boottime())
                self._server.turn(boottime())
        self._notify.stopping()
        self._close()

    def _close(self) -> None:
        """Let go of all that the kernel gave us."""
        self._server.close()
        self._owners.close()
        self.loop.forget(self._watch.fd)
        self._watch.close()

    def _until(self) -> float:
        """Return when the loop must go round again."""
        due = min(self.pace.due, self._server.due(), self.rounds.due())
        watchdog = self._notify.watchdog
        return min(due, boottime() + watchdog / 3) if watchdog else due

    def _wanted(self) -> None:
        self.pace.wanted(boottime())

    def _look(self, _: int) -> None:
        if self._watch.changed():
            self._wanted()
            self._server.stir()

    def _round(self) -> None:
        node = self.rounds.node
        self._watch.follow(node.store)  # what comes while we reconcile is seen after it
        report = self.rounds.once(boottime())
        self.pace.done(boottime(), restless(report, node))
        self._watch.follow(node.store)
        if report is not None:
            freed = {outcome.lock.id for outcome in report.outcomes if outcome.act == FREED}
            made = {device for record in report.adopted for device in record.devices}
            if self._watch.changed(freed, made):
                self._wanted()
            if freed:
                self._server.stir()
            self._owners.follow(report, node.proc)
        self._serve(report)
        slow = {"watch": f"changes are seen every {PERIOD:.0f} s only: {self._watch.fault}"}
        self._journal.stands("watch", slow if self._watch.fault else {})
        if self.rounds.summary != self._status:
            self._status = self.rounds.summary
            self._notify.status(self._status)

    def _serve(self, report: Report | None) -> None:
        """Open the socket, or close it where a scheduler owns the node by now."""
        why_not = self._serving.why_not(self.rounds.node, report, boottime())
        failed = ""
        if why_not:
            self._server.close(why_not)
        elif report is not None:
            try:
                self._server.open()
            except OSError as fault:
                failed = f"users are not served: {fault}"
        wanted = self.rounds.node.settings.serve
        refused = f"users are not served although SERVE=yes: {why_not}"
        self._journal.stands("serve", {"refused": refused} if wanted and why_not else {})
        self._journal.stands("socket", {"failed": failed} if failed else {}, ERROR)

    def _reload(self) -> None:
        """Read the settings again; bad ones change nothing."""
        self._signals.reload = False
        self._notify.reloading()
        try:
            fresh = DaemonNode(load(self.rounds.node.settings.path))
            fresh.asking = self.rounds.node.asking  # a driver that hangs is asked once
            self.rounds.node = fresh
            self._serving.ask_again()
            self._journal.say(INFO, "the settings were read again")
        except Refusal as refusal:
            self._journal.say(ERROR, f"{refusal.why}; the settings stay as they were")
        self._round()
        self._notify.ready(self.rounds.summary)
