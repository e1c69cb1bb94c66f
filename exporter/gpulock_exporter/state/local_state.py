# SPDX-License-Identifier: Apache-2.0
"""What gpulock's own files say, read as an ordinary user: locks, verdicts, quarantine, counters.

Each source may fail on its own: what it would have told is then not known. Nothing is written,
no gate is taken, and a lock that is being made or released this moment is looked at again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from gpulock.alloc import node_view
from gpulock.errors import UNKNOWN, Refusal, one_line
from gpulock.node.context import Node
from gpulock.store import atomic, kv
from gpulock.store.locks import Lock, LockStore
from gpulock.store.verdicts import Verdict
from gpulock_exporter.state.claim_accounting import LedgerClaim
from gpulock_exporter.state.lock_cache import LockCache

SETTLE = 0.005  # seconds for a lock without owner, of each tick: a claim takes 0.2 ms

_T = TypeVar("_T")
Judged = tuple[dict[str, Verdict] | None, float | None]


class LocalState(node_view.NodeView):
    """What was read; None is not known. `failures` has why, `durations` seconds, by source.

    `counters` is what the hooks count.
    """

    def __init__(
        self,
        locks: dict[str, Lock] | None = None,
        quarantined: dict[str, str] | None = None,
        verdicts: dict[str, Verdict] | None = None,
        reconciled: float | None = None,
        counters: Mapping[str, str] | None = None,
        durations: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(locks, quarantined, verdicts, reconciled)
        self.counters: dict[str, str] = dict(counters or {})
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


def read_local_state(node: Node, now: float, known: LockCache | None = None) -> LocalState:
    """Read everything; never raises. `now` is CLOCK_BOOTTIME in seconds.

    `known` are the locks as they were read before, for whoever reads them each second.
    """
    facts, locks = LocalState(), known or LockCache(read_locks_with_details)
    facts.locks = facts.read("locks", lambda: read_boot_locks(node, locks), None)
    facts.quarantined = facts.read(
        "quarantine", lambda: node_view.read_quarantine_reasons(node.settings.state_dir), None
    )
    nothing: Judged = (None, None)
    judged = facts.read("verdicts", lambda: node_view.read_node_verdicts(node, now), nothing)
    facts.verdicts, facts.reconciled = judged
    facts.counters = facts.read("counters", lambda: read_hook_counters(node.store), {})
    return facts


def read_boot_locks(node: Node, known: LockCache) -> dict[str, Lock]:
    """Return every lock; raise Refusal also where those of this boot were lost.

    Then nothing is free: jobs run on devices that nobody can name. A boot_id that is there, and
    broken, costs the verdicts only.
    """
    if not os.path.lexists(f"{node.store.path}/boot_id") and node_view.are_locks_lost(node):
        raise Refusal(UNKNOWN, "the locks of this boot were lost", "run gpulock reap as root")
    return known.locks(node.store)


def read_locks_with_details(store: LockStore) -> dict[str, Lock]:
    """Return every lock with its details; raise Refusal where they cannot be seen."""
    return node_view.read_settled_locks(store, SETTLE)


def read_hook_counters(store: LockStore) -> dict[str, str]:
    """Return what the hooks count in this boot."""
    try:
        return kv.decode_pairs(atomic.read_text(f"{store.path}/totals"))
    except FileNotFoundError:
        return {}


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
