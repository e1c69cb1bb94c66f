# SPDX-License-Identifier: Apache-2.0
"""One round of gpulockd: reconcile, say what is new, then the chores.

A round that cannot be done (a gate held too long, a LOCK_DIR that is not ours) is said once, and
tried again. Nothing that goes wrong in a round ends the daemon but another gpulockd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gpulock.alloc.reaper import FREED, ORPHANS
from gpulock.daemon.core.instance_lock import AlreadyRunningError, InstanceLock
from gpulock.daemon.core.journal import ERROR, NOTICE, DaemonJournal, describe_exception, run_each
from gpulock.daemon.reconcile import report_messages
from gpulock.daemon.reconcile.reconcile import Chore, DaemonNode, ReconcileReport, reconcile_locks
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.slurm.scontrol import SlurmctldClient, SlurmctldSilentError
from gpulock.store.verdicts import UNKNOWN

AGAIN = 60.0  # seconds between two questions to a slurmctld that is silent
ROUND_SECONDS = 10.0  # at the gate: half of what a hook waits there


class ControllerSilence:
    """Not `until` then is slurmctld asked (CLOCK_BOOTTIME); kept between rounds.

    A question is asked with the gate held, and a slurmctld that does not answer takes five seconds
    of every hook that waits there. Meanwhile what it would decide is unknown, and held.
    """

    def __init__(self) -> None:
        self.until = 0.0


class BackoffControl(SlurmctldClient):
    """slurmctld, of whom nothing is asked while it is silent."""

    __slots__ = ("_silence",)

    def __init__(self, settings: Settings, silence: ControllerSilence) -> None:
        super().__init__(settings)
        self._silence = silence

    def job(self, job: str) -> dict[str, str] | None:
        """Return what slurmctld knows of one job, None for an invalid id; raise Refusal.

        An odd answer about one job is no silence.
        """
        if clock_boottime() < self._silence.until:
            raise SlurmctldSilentError("slurmctld did not answer a while ago")
        try:
            return super().job(job)
        except Refusal as fault:
            if not (isinstance(fault, SlurmctldSilentError) and fault.heard):
                self._silence.until = clock_boottime() + AGAIN
            raise


class Rounds:
    """Rounds on one node; `due` is when a chore has work before the next (CLOCK_BOOTTIME)."""

    def __init__(self, node: DaemonNode, journal: DaemonJournal, chores: Sequence[Chore]) -> None:
        self.node = node
        self.single = InstanceLock()
        self.summary = "starting"
        self.due = float("inf")
        self._journal = journal
        self._chores = chores
        self._silence = ControllerSilence()

    def use_settings(self, settings: Settings) -> None:
        """Go on with other settings; raise Refusal."""
        fresh = DaemonNode(settings)
        fresh.caller = self.node.caller  # a driver that hangs is asked once
        self.node = fresh

    def run_round(self, now: float) -> ReconcileReport | None:
        """Do one round; return its report, None where it failed. Raises AlreadyRunningError."""
        report, failed = None, ""
        settings, silence = self.node.settings, self._silence
        try:
            self.node.store.check(make=True)
            self.single.take(self.node.store.path)
            judge = make_liveness_judge(self.node, lambda: BackoffControl(settings, silence))
            report = reconcile_locks(self.node, judge, Deadline(ROUND_SECONDS))
            report.cards = self.node.cards
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
        expected = settings.expected_gpus
        lasting = report_messages.lasting_problem_messages(report, expected)
        self._journal.log_changes("node", lasting)
        self.summary = report_messages.format_daemon_status(report, expected)
        return report

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


def needs_recheck(report: ReconcileReport | None, node: Node) -> bool:
    """Return whether something that is held may be free at any moment."""
    if report is None:
        return True
    for outcome in report.outcomes:
        record = outcome.lock.owner
        if outcome.act == FREED or record is None or outcome.verdict.state == UNKNOWN:
            continue
        if record.draining or outcome.act == ORPHANS:
            return True
        try:
            if record.pid and not node.proc.running(record.pid, record.start):
                return True
        except (OSError, ValueError):
            continue
    return False
