# SPDX-License-Identifier: Apache-2.0
"""gpulockd itself: rounds when they are due, between them it sleeps.

One round is: reconcile, say what is new, then the chores. One that cannot be done (a gate held too
long, a LOCK_DIR that is not ours) is said once, and tried again. Nothing that goes wrong in a round
ends gpulockd but another one. Only a turn of the loop pings the service manager, so its watchdog
ends a round that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gpulock.alloc.reaper import FREED
from gpulock.daemon.core.instance_lock import AlreadyRunningError, InstanceLock
from gpulock.daemon.core.journal import (
    ERROR,
    INFO,
    NOTICE,
    DaemonJournal,
    SystemdNotifier,
    describe_exception,
    run_each,
)
from gpulock.daemon.core.loop import DaemonSignals, EventLoop
from gpulock.daemon.reconcile import report_messages
from gpulock.daemon.reconcile.lock_watch import LockDirWatch, OwnerWatcher
from gpulock.daemon.reconcile.reconcile import Chore, DaemonNode, ReconcileReport, reconcile_locks
from gpulock.daemon.serve_policy import why_users_are_not_served
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.slurm.scontrol import SlurmctldClient
from gpulock.store.verdicts import PERIOD
from gpulock.workstation.server import ClaimServer

SETTLING = 0.05  # seconds after a change: an epilog that has just begun is done by then
SPACING = 0.5  # seconds between two reconciles that changes brought forward
AGAIN = 5.0  # seconds until a reconcile that failed is tried again
ASK_AGAIN = 60.0  # seconds between two questions to a slurmctld that is silent
ROUND_SECONDS = 10.0  # at the gate: half of what a hook waits there


class Rounds:
    """Rounds on one node; `due` is when a chore has work before the next (CLOCK_BOOTTIME)."""

    def __init__(self, node: DaemonNode, journal: DaemonJournal, chores: Sequence[Chore]) -> None:
        self.node = node
        self.single = InstanceLock()
        self.summary = "starting"
        self.due = float("inf")
        self._journal = journal
        self._chores = chores
        self._control: SlurmctldClient | None = None
        self._asked = 0.0  # when that was made (CLOCK_BOOTTIME)

    def use_settings(self, settings: Settings) -> None:
        """Go on with other settings; raise Refusal."""
        fresh = DaemonNode(settings)
        fresh.caller = self.node.caller  # a driver that hangs is asked once
        self.node = fresh
        self._control = None

    def run_round(self, now: float) -> ReconcileReport | None:
        """Do one round; return its report, None where it failed. Raises AlreadyRunningError."""
        report, failed = None, ""
        try:
            self.node.store.check(make=True)
            self.single.take(self.node.store.path)
            judge = make_liveness_judge(self.node, self.ask_slurmctld())
            report = reconcile_locks(self.node, judge, Deadline(ROUND_SECONDS))
        except AlreadyRunningError:
            raise
        except Exception as fault:  # whatever it is, the next round may go well
            failed = describe_exception("a reconcile", fault)
        self._journal.log_state("round", failed, ERROR)
        if report is None:
            self.summary = failed
            return None
        for line in report_messages.reconcile_event_messages(report):
            self._journal.say(NOTICE, line)
        # a claim that is over does not wait for what lasts
        self._do_chores("chores", self._chores, lambda one: one.run(self.node, report, now))
        expected = self.node.settings.expected_gpus
        lasting = report_messages.lasting_problem_messages(report, expected)
        self._journal.log_changes("node", lasting)
        self.summary = report_messages.format_daemon_status(report, expected)
        return report

    def ask_slurmctld(self) -> SlurmctldClient:
        """Return what asks slurmctld in this round; one that is silent is asked again later.

        A question is asked with the gate held, and a slurmctld that does not answer takes five
        seconds of every hook that waits there. Meanwhile what it would decide is unknown, and held.
        """
        now = clock_boottime()
        if self._control is None or self._control.silent is None or now >= self._asked + ASK_AGAIN:
            self._control, self._asked = SlurmctldClient(self.node.settings), now
        return self._control

    def run_due(self, now: float) -> None:
        """Let the chores go on that have work between the rounds."""
        due = [chore for chore in self._chores if now >= chore.due]
        self._do_chores("turns", due, lambda chore: chore.run_due(now))

    def _do_chores(
        self, part: str, chores: Sequence[Chore], act: Callable[[Chore], object]
    ) -> None:
        """Let chores act, one after another; one that fails stops no other."""
        failed = run_each([(type(one).__name__, partial(act, one)) for one in chores])
        self.due = min([chore.due for chore in self._chores], default=self.due)
        self._journal.log_changes(part, failed, ERROR)

    def close(self) -> None:
        """Let go of what the chores have at work, and of being this node's gpulockd."""
        for chore in self._chores:
            chore.close()
        self.single.release()


class ReconcileSchedule:
    """`due` is when the next reconcile is (CLOCK_BOOTTIME); it learns of changes and of reconciles.

    A change brings it forward, but a burst of changes is one reconcile.
    """

    def __init__(self, now: float) -> None:
        self.due = now
        self._last = now - SPACING

    def request_reconcile(self, now: float) -> None:
        """Reconcile soon: something changed."""
        self.due = min(self.due, max(now + SETTLING, self._last + SPACING))

    def record_reconcile(self, now: float, next_at: float) -> None:
        """Note that one is over, and that the next one has work at `next_at`."""
        self._last = now
        self.due = min(now + PERIOD, max(next_at, now + SPACING))


class GpulockDaemon:
    """One gpulockd, from its settings to the signal that ends it."""

    def __init__(
        self,
        settings: Settings,
        journal: DaemonJournal,
        notify: SystemdNotifier,
        signals: DaemonSignals,
        chores: Sequence[Chore],
    ) -> None:
        self.rounds = Rounds(DaemonNode(settings), journal, chores)
        self.loop = EventLoop()
        self.pace = ReconcileSchedule(clock_boottime())
        self._owners = OwnerWatcher(self.loop, self.pace.request_reconcile)
        self._watch = LockDirWatch()
        self._server = ClaimServer(self.loop, journal, lambda: self.rounds.node)
        self._journal = journal
        self._notify = notify
        self._signals = signals
        self._why_closed = ""
        self._users_first_until = 0.0

    def run(self) -> None:
        """Go round until a signal ends it; raise AlreadyRunningError."""
        self.loop.watch(self._signals.fd, self._signals.drain)
        if self._watch.fd >= 0:
            self.loop.watch(self._watch.fd, self._on_lock_dir_change)
        self._run_round()
        self._notify.ready(self.rounds.summary)
        while not self._signals.ending:
            if clock_boottime() >= self._notify.due:
                self._notify.alive(clock_boottime())
            if self._signals.reload:
                self._reload()
            due = min(self.reconcile_due(), self.rounds.due, self._notify.due)
            self.loop.wait(min(due, self._server.due()) if self._server.clients else due)
            now = clock_boottime()
            if now >= self.reconcile_due() and not self._signals.ending:
                self._run_round()
            if now >= self.rounds.due and not self._signals.ending:
                self.rounds.run_due(clock_boottime())
            if self._server.clients and not self._signals.ending:
                self._server.run_due(clock_boottime())
        self._notify.send("STOPPING=1", "STATUS=stopping")
        self._server.close()
        self.rounds.close()

    def reconcile_due(self) -> float:
        """Return when the next reconcile is due, as CLOCK_BOOTTIME seconds.

        Where users are served, their calls have as much time before it as the last one took: a
        user whose claims end again and again has it look at that user's files each time.
        """
        return max(self.pace.due, self._users_first_until)

    def _on_lock_dir_change(self, _: int) -> None:
        if self._watch.changed():
            self.pace.request_reconcile(clock_boottime())
            self._server.line.retry_now()

    def _run_round(self) -> None:
        node, begun = self.rounds.node, clock_boottime()
        self._watch.follow(node.store)  # what comes while we reconcile is seen after it
        report = self.rounds.run_round(begun)
        now = clock_boottime()
        self.pace.record_reconcile(now, report.next_at if report else now + AGAIN)
        self._watch.follow(node.store)
        if report is not None:
            if node.settings.user_claims and any(one.act == FREED for one in report.outcomes):
                self._server.line.retry_now()
            self._owners.follow(report, node.proc)
        self._serve(report)
        slow = f"changes are seen every {PERIOD:.0f} s only: {self._watch.fault}"
        self._journal.log_state("watch", slow if self._watch.fault else "")
        self._notify.send(f"STATUS={self.rounds.summary}")
        if not self._why_closed:
            self._users_first_until = 2 * clock_boottime() - begun

    def _serve(self, report: ReconcileReport | None) -> None:
        """Open the socket, or close it where gpulock is installed into a scheduler by now."""
        why_not = why_users_are_not_served(self.rounds.node)
        failed = ""
        if why_not and why_not != self._why_closed:
            self._server.close(why_not)
        elif not why_not and report is not None:
            try:
                self._server.open()
            except OSError as fault:
                failed = f"users are not served: {fault}"
        self._why_closed = why_not
        wanted = self.rounds.node.settings.user_claims
        refused = f"users are not served although USER_CLAIMS=yes: {why_not}"
        self._journal.log_state("serve", refused if wanted and why_not else "")
        self._journal.log_state("socket", failed, ERROR)

    def _reload(self) -> None:
        """Read the settings again; where the file is bad, those count that were obeyed last."""
        self._signals.reload = False
        self._notify.reloading()
        try:
            settings = read_settings(self.rounds.node.settings.path, keep=True)
            self.rounds.use_settings(settings)
            self._journal.log_changes("settings", {one: one for one in settings.faults}, ERROR)
            self._journal.say(INFO, "the settings were read again")
        except Refusal as refusal:
            self._journal.say(ERROR, f"{refusal.why}; the settings stay as they were")
        self._run_round()
        self._notify.ready(self.rounds.summary)
