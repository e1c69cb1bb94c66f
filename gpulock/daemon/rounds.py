# SPDX-License-Identifier: Apache-2.0
"""One round of gpulockd: reconcile, say what is new, then the chores.

A round that cannot be done (a gate held too long, a LOCK_DIR that is not ours) is said once, and
tried again. Nothing that goes wrong in a round ends the daemon but another gpulockd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gpulock.daemon.core.instance_lock import AlreadyRunningError, InstanceLock
from gpulock.daemon.core.journal import ERROR, NOTICE, DaemonJournal, describe_exception, run_each
from gpulock.daemon.reconcile import report_messages
from gpulock.daemon.reconcile.reconcile import Chore, DaemonNode, ReconcileReport, reconcile_locks
from gpulock.deadline import Deadline, clock_boottime
from gpulock.node.settings import Settings
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.slurm.scontrol import SlurmctldClient

AGAIN = 60.0  # seconds between two questions to a slurmctld that is silent
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
        """Return what asks slurmctld in this round; one that is silent is asked again after AGAIN.

        A question is asked with the gate held, and a slurmctld that does not answer takes five
        seconds of every hook that waits there. Meanwhile what it would decide is unknown, and held.
        """
        now = clock_boottime()
        if self._control is None or self._control.silent is None or now >= self._asked + AGAIN:
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
