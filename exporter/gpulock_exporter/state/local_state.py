# SPDX-License-Identifier: Apache-2.0
"""What gpulock's own files say, read as an ordinary user: locks, verdicts, quarantine, counters.

Each source may fail on its own: what it would have told is then not known. Nothing is written,
no gate is taken, and a lock that is being made or released this moment is looked at again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from gpulock.errors import UNKNOWN, Refusal, one_line
from gpulock.node.context import Node
from gpulock.store import atomic, kv, quarantine, verdicts
from gpulock.store.locks import Lock, LockStore
from gpulock.store.verdicts import Verdict
from gpulock_exporter.state.claim_accounting import LedgerClaim
from gpulock_exporter.state.lock_cache import LockCache

TRIES, PAUSE = 3, 0.002  # looks at a lock without owner, seconds between: a claim takes 0.2 ms

_T = TypeVar("_T")
Judged = tuple[dict[str, Verdict] | None, float | None]


@dataclass
class LocalState:
    """What was read; None is not known. `failures` has why, `durations` seconds, by source.

    `quarantined` has the reason by id, `reconciled` when the verdicts were made (CLOCK_BOOTTIME),
    `counters` what the hooks count.
    """

    locks: dict[str, Lock] | None = None
    quarantined: dict[str, str] | None = None
    verdicts: dict[str, Verdict] | None = None
    reconciled: float | None = None
    counters: dict[str, str] = field(default_factory=dict[str, str])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    durations: dict[str, float] = field(default_factory=dict[str, float])

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
        "quarantine", lambda: read_quarantine_reasons(node.settings.state_dir), None
    )
    nothing: Judged = (None, None)
    judged = facts.read("verdicts", lambda: read_node_verdicts(node, now), nothing)
    facts.verdicts, facts.reconciled = judged
    facts.counters = facts.read("counters", lambda: read_hook_counters(node.store), {})
    return facts


def read_boot_locks(node: Node, known: LockCache) -> dict[str, Lock]:
    """Return every lock; raise Refusal also where those of this boot were lost (store.boot).

    Then nothing is free: jobs run on devices that nobody can name.
    """
    if not os.path.lexists(f"{node.store.path}/boot_id") and last_state_boot(node) == node.boot_id:
        raise Refusal(UNKNOWN, "the locks of this boot were lost", "run gpulock reap as root")
    return known.locks(node.store)


def last_state_boot(node: Node) -> str:
    """Return the boot that STATE_DIR saw last, nothing where it was never used."""
    try:
        return atomic.read_text(f"{node.settings.state_dir}/boot_id").strip()
    except FileNotFoundError:
        return ""


def read_locks_with_details(store: LockStore) -> dict[str, Lock]:
    """Return every lock with its details; raise Refusal where they cannot be seen."""
    if not store.exists():
        return {}
    held = store.read_all_locks()
    for _ in range(TRIES):
        if all(lock.owner or lock.fault for lock in held.values()):
            break
        time.sleep(PAUSE)
        held = store.read_all_locks()
    for lock in held.values():
        store.read_details(lock)
    return held


def read_quarantine_reasons(state_dir: str) -> dict[str, str]:
    """Return why each quarantined device is, none where STATE_DIR was never used."""
    folder = quarantine.QUARANTINE
    if not os.path.lexists(f"{state_dir}/{folder}"):
        return {}
    found: dict[str, str] = {}
    for name in quarantine.list_noted_devices(state_dir, folder):
        note = quarantine.read_device_note(state_dir, folder, name)
        by = f" ({note['by']})" if "by" in note else ""
        found[name] = note.get("reason", "no reason noted") + by
    return found


def read_node_verdicts(node: Node, now: float) -> Judged:
    """Return the verdicts where they are fresh, and when the last reconcile of this boot was."""
    if node.store.boot_id() != node.boot_id:
        return None, None
    return verdicts.read_dated_verdicts(node.store.path, now, node.boot_id)


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
