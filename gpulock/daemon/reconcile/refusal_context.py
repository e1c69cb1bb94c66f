# SPDX-License-Identifier: Apache-2.0
"""Bring a refusal to where the job's user looks: the context that `qstat -j` shows.

qmaster is asked in a thread, which may take as long as it likes; a note that could not be brought
is dropped, since the prolog has said it on stderr and in syslog. Slurm's users are told by the
TaskProlog or by slurmctld's own words: a comment is theirs, and not written over.
"""

from __future__ import annotations

import os
import time
from typing import ClassVar

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import INFO, DaemonJournal
from gpulock.daemon.core.sge_client import ANSWER_SECONDS, ask_qmaster
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import REFUSALS, TIME, Chore, Due
from gpulock.deadline import Deadline
from gpulock.errors import Refusal, one_line, shorten
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store import atomic
from gpulock.store.refusal_notes import FOLDER, LIMIT, keep_told_note

VARIABLE = "gpulock"
LENGTH = 240  # bytes that are told
MAX_NOTES_PER_ROUND = 20  # notes of one round
OLD = 120.0  # seconds: a hook writes its note within its own deadline


class RefusalNotifier(Chore):
    """The chore that takes notes away, and has them told; one thread at a time."""

    after: ClassVar[Due] = {REFUSALS: (), TIME: ()}

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self.asking: BackgroundCall[list[str]] | None = None

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Have told what hooks noted since; raise OSError."""
        if self.asking is not None:
            if not self.asking.wait(0.0):
                return
            asked, self.asking = self.asking, None  # an exception of its is raised once
            for line in asked.answer():
                self._journal.say(INFO, line)
        notes = take_refusal_notes(node.store.path, time.time())
        if notes and node.settings.sge_root:
            settings = node.settings
            self.asking = BackgroundCall(lambda: set_job_contexts(settings, notes))


def take_refusal_notes(lock_dir: str, now: float) -> dict[str, str]:
    """Return the notes by job and take them away, with what was cut short long before `now`.

    Hooks write meanwhile: each is taken under another name first, so that a later note stays. What
    was taken is kept beside them for `gpulock why`.
    """
    folder = f"{lock_dir}/{FOLDER}"
    found: dict[str, str] = {}
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return {}
    for name in names:
        path, taken = f"{folder}/{name}", f"{folder}/.{name}.taken"
        try:
            if not name.isdecimal():
                if now - os.lstat(path).st_mtime > OLD:
                    atomic.remove_quietly(path)
            elif len(found) < MAX_NOTES_PER_ROUND:
                os.rename(path, taken)
                found[name] = atomic.read_text(taken, LIMIT)
                keep_told_note(lock_dir, name, taken)
        except OSError:
            pass  # whatever stands there, it is no note
        atomic.remove_quietly(taken)
    return found


def set_job_contexts(settings: Settings, notes: dict[str, str]) -> list[str]:
    """Set the context of each job; return what went wrong, in lines."""
    failed: list[str] = []
    deadline = Deadline(ANSWER_SECONDS)
    for job, text in notes.items():
        try:
            words = ("-ac", f"{VARIABLE}={format_context_value(text)}", job)
            ask_qmaster(settings, "qalter", *words, deadline=deadline)
        except (Refusal, OSError) as fault:
            failed.append(f"job {job} was refused, but its context was not updated: {fault}")
    return failed


def format_context_value(text: str) -> str:
    """Return a text as the value of one variable: qalter(1) splits at commas."""
    return shorten(one_line(text).replace(",", ";").replace('"', "'").strip(), LENGTH)
