# SPDX-License-Identifier: Apache-2.0
"""Bring a refusal to where the job's user looks: the context that `qstat -j` shows.

qmaster is asked in a thread, which may take as long as it likes; what could not be brought is
dropped, since the prolog has said it on stderr and in syslog. Slurm's users are told by the
TaskProlog or by slurmctld's own words: a comment is theirs, and not written over.
"""

from __future__ import annotations

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import INFO, DaemonJournal
from gpulock.daemon.core.sge_client import ANSWER_SECONDS, ask_qmaster
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import Chore
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal, one_line, shorten
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store.event_log import list_refusals, read_events

VARIABLE = "gpulock"
LENGTH = 240  # bytes that are told
MOST_REFUSALS = 20  # that are told in one round
RECENT = 120.0  # seconds: a refusal before gpulockd began is told within them


class RefusalNotifier(Chore):
    """The chore that has refusals told, each once; one thread at a time."""

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self._since = clock_boottime() - RECENT
        self._told: set[tuple[float, str, str]] = set()  # of those that the log still has
        self.asking: BackgroundCall[list[str]] | None = None

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Have told what the prolog refused since; raise OSError."""
        if self.asking is not None:
            if not self.asking.wait(0.0):
                return
            asked, self.asking = self.asking, None  # an exception of its is raised once
            for line in asked.answer():
                self._journal.say(INFO, line)
        if not node.settings.sge_root:
            return
        logged = list_refusals(read_events(node.store.path), self._since)
        refused = [one for one in logged if one not in self._told][:MOST_REFUSALS]
        self._told = {one for one in logged if one in self._told or one in refused}
        if refused:
            settings, sentences = node.settings, {job: text for _, job, text in refused}
            self.asking = BackgroundCall(lambda: set_job_contexts(settings, sentences))


def set_job_contexts(settings: Settings, sentences: dict[str, str]) -> list[str]:
    """Set the context of each job; return what went wrong, in lines."""
    failed: list[str] = []
    deadline = Deadline(ANSWER_SECONDS)
    for job, text in sentences.items():
        try:
            words = ("-ac", f"{VARIABLE}={format_context_value(text)}", job)
            ask_qmaster(settings, "qalter", *words, deadline=deadline)
        except (Refusal, OSError) as fault:
            failed.append(f"job {job} was refused, but its context was not updated: {fault}")
    return failed


def format_context_value(text: str) -> str:
    """Return a text as the value of one variable: qalter(1) splits at commas."""
    return shorten(one_line(text).replace(",", ";").replace('"', "'").strip(), LENGTH)
