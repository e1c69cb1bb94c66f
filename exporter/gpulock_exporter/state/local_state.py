# SPDX-License-Identifier: Apache-2.0
"""What gpulock's own files say, read as an ordinary user: locks, verdicts, quarantine, counters.

Each source may fail on its own: what it would have told is then not known. Nothing is written,
no gate is taken, and a lock that is being made or released this moment is looked at again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Optional, TypeVar

from gpulock.alloc import node_view
from gpulock.alloc.states import NodeView
from gpulock.daemon.health.steps import NAME as HISTORY
from gpulock.daemon.health.steps import count_health_steps
from gpulock.errors import Refusal, lost_records_refusal, one_line
from gpulock.node.context import Node
from gpulock.store.checks import CardChecks, read_card_checks
from gpulock.store.event_log import count_events, read_events
from gpulock.store.foreign import read_foreign_uses
from gpulock.store.locks import ANCHORS, RECORD, Lock, LockStore
from gpulock.store.verdicts import Verdict
from gpulock_exporter.state.claim_accounting import LedgerClaim
from gpulock_exporter.state.job_cgroups import HostUsage, JobCgroups

SETTLED = 1_000_000_000  # nanoseconds; the kernel's clock for files ticks each 1 to 10 ms

Mark = tuple[str, int, int, int, int]  # path, inode, size, time stamps in nanoseconds
Marks = tuple[Mark, ...]

_T = TypeVar("_T")
Judged = tuple[Optional[dict[str, Verdict]], Optional[float]]


class LocalState(NodeView):
    """What was read; None is not known. `failures` has why, `durations` seconds, by source.

    `counters` is what the hooks count.
    """

    def __init__(
        self,
        locks: dict[str, Lock] | None = None,
        quarantined: dict[str, str] | None = None,
        verdicts: dict[str, Verdict] | None = None,
        reconciled: float | None = None,
        counters: Mapping[str, float] | None = None,
        durations: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(locks, quarantined, verdicts, reconciled)
        self.counters: dict[str, float] = dict(counters or {})
        self.checks: dict[str, CardChecks] = {}  # by bus id
        self.steps: Mapping[str, int] = {}  # of GPUs out of service and back, by kind
        self.host_usage: dict[str, HostUsage] = {}  # by token
        self.failures: dict[str, str] = {}
        self.durations: dict[str, float] = dict(durations or {})

    def read(self, source: str, how: Callable[[], _T], otherwise: _T) -> _T:
        """Return what a source says; note how long that took, and whether it failed."""
        begun = time.perf_counter()
        try:
            return how()
        except (OSError, ValueError, Refusal) as fault:
            self.failures[source] = one_line(str(fault))
            return otherwise
        finally:
            self.durations[source] = time.perf_counter() - begun


def read_local_state(
    node: Node,
    now: float,
    known: LockCache | None = None,
    jobs: JobCgroups | None = None,
    steps: StepCounter | None = None,
) -> LocalState:
    """Read everything; never raises. `now` is CLOCK_BOOTTIME in seconds.

    `known` are the locks, `jobs` the jobs' cgroups, and `steps` those of health, as they were read
    before, for a caller that reads them each second.
    """
    facts, locks = LocalState(), known or LockCache(node_view.read_detailed_locks)
    facts.locks = facts.read("locks", lambda: read_boot_locks(node, locks), None)
    facts.quarantined = facts.read(
        "quarantine", lambda: node_view.read_quarantine_reasons(node.settings.state_dir), None
    )
    facts.closed = node_view.read_closed_cards(node)
    nothing: Judged = (None, None)
    judged = facts.read("verdicts", lambda: node_view.read_node_verdicts(node, now), nothing)
    facts.verdicts, facts.reconciled = judged
    facts.open_foreign = facts.read(
        "foreign", lambda: read_foreign_uses(node.store.path, now, node.boot_id) or {}, {}
    )
    facts.checks = facts.read(
        "checks", lambda: read_card_checks(node.store.path, node.boot_id)[0], {}
    )
    if jobs is not None:
        owners = {lock.owner.token: lock.owner for lock in facts.held.values() if lock.owner}
        facts.host_usage = facts.read("jobs", lambda: jobs.read(owners, now), {})
    if steps is not None:
        facts.steps = facts.read("health_history", steps.count, {})
    facts.counters = facts.read("counters", lambda: read_hook_counters(node.store), {})
    return facts


def read_boot_locks(node: Node, known: LockCache) -> dict[str, Lock]:
    """Return every lock; raise Refusal also where the records of this boot were lost.

    Then nothing is free: jobs run on devices that nobody can name. A boot_id that is there, and
    broken, costs the verdicts only.
    """
    if not os.path.lexists(f"{node.store.root}/boot_id") and node_view.are_records_lost(node):
        raise lost_records_refusal(node.store.root)
    return known.locks(node.store)


def read_hook_counters(store: LockStore) -> dict[str, float]:
    """Return what the hooks count in this boot; raise OSError."""
    return count_events(read_events(store.path))


def ledger_claims(
    locks: Mapping[str, Lock] | None, boot_id: str, now: float
) -> dict[str, LedgerClaim | None] | None:
    """Return who holds each device since when; None for one whose owner cannot be read. Pure.

    A claim of another boot is as old as we know it: its time is of another clock.
    """
    if locks is None:
        return None
    found: dict[str, LedgerClaim | None] = {}
    for name, lock in locks.items():
        record = lock.owner
        if record is None:
            found[name] = None
            continue
        ours = record.boot_id == boot_id and 0 < record.claimed_boottime <= now
        found[name] = LedgerClaim(record.token, record.claimed_boottime if ours else now)
    return found


class LockCache:
    """The locks of one node, read again once anything there has changed.

    `read` is what reads them all, `now` the wall clock of files. All that changes a claim makes,
    renames or removes a file in its folder, or in that of its anchors, and so gives the folder
    another time stamp (store.grants); a record that somebody has written over has one itself. Two
    changes within one tick of the kernel's clock have the same time: what has changed a moment ago
    is read again all the same.
    """

    def __init__(
        self,
        read: Callable[[LockStore], dict[str, Lock]],
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self._read = read
        self._now = now
        self._marks: Marks | None = None
        self._held: dict[str, Lock] = {}

    def locks(self, store: LockStore) -> dict[str, Lock]:
        """Return every lock with its details; raise what `read` raises."""
        marks, at = read_lock_marks(store), self._now()
        if marks is None or marks != self._marks:
            self._marks = None
            self._held = self._read(store)
            sound = all(lock.owner and not lock.fault for lock in self._held.values())
            if marks is not None and sound and are_marks_settled(marks, at):
                self._marks = marks
        return dict(self._held)


class StepCounter:
    """The steps in STATE_DIR/health-history by kind, counted again once that file has changed."""

    def __init__(self, state_dir: str) -> None:
        self._dir = state_dir
        self._mark: Mark | None = None
        self._steps: Mapping[str, int] = {}

    def count(self) -> Mapping[str, int]:
        """Return how many there were of each kind; raise OSError."""
        mark = None
        if os.path.lexists(path := f"{self._dir}/{HISTORY}"):
            mark = read_file_mark(path)
        if mark is None or mark != self._mark:
            self._steps, self._mark = count_health_steps(self._dir), mark
        return self._steps


def read_lock_marks(store: LockStore) -> Marks | None:
    """Return what tells one state of the locks from another, None where it cannot be told."""
    found: list[Mark] = []
    try:
        for folder, file in ((store.claims_dir, RECORD), (store.locks_dir, "owner")):
            for name in sorted(os.listdir(folder)):
                path = f"{folder}/{name}"
                found += (read_file_mark(path), read_file_mark(f"{path}/{file}"))
                if os.path.exists(f"{path}/{ANCHORS}"):
                    found.append(read_file_mark(f"{path}/{ANCHORS}"))
    except OSError:
        return None  # one is being made, or is gone this moment
    return tuple(found)


def read_file_mark(path: str) -> Mark:
    """Return what tells one state of a file or folder from another; raise OSError."""
    info = os.stat(path)
    return path, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def are_marks_settled(marks: Marks, now: int) -> bool:
    """Return whether any later change will have another time stamp than these."""
    return all(now - max(changed, noted) >= SETTLED for *_, changed, noted in marks)
