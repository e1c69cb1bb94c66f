# SPDX-License-Identifier: Apache-2.0
"""What gpulock's own files say, read as an ordinary user: locks, verdicts, quarantine, counters.

Each source may fail on its own: what it would have told is then not known. Nothing is written,
no gate is taken, and a lock that is being made or released this moment is looked at again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Optional, TypeVar

from gpulock.alloc import node_view
from gpulock.alloc.states import NodeView
from gpulock.daemon.core.sample import is_claim_token
from gpulock.daemon.health.cards import NodeCards, read_cards
from gpulock.errors import Refusal, one_line
from gpulock.node.context import Node
from gpulock.store.event_log import count_events, read_events
from gpulock.store.locks import Lock
from gpulock.store.quarantine import QUARANTINE, note_reason, read_device_notes
from gpulock.store.verdicts import Verdict
from gpulock.workstation.waiting import WaitingCaller, read_waiting
from gpulock_exporter.state.claim_accounting import LedgerClaim

_T = TypeVar("_T")
Judged = tuple[Optional[dict[str, Verdict]], Optional[float]]


class LocalState(NodeView):
    """What was read; None is not known. `failures` has why, by one of the `sources`.

    `counters` is what the hooks count, `quarantine_notes` are by lock id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[str, float] = {}
        self.quarantine_notes: dict[str, dict[str, str]] | None = None
        self.cards = NodeCards("")  # what gpulockd knows of them
        self.waiting: list[WaitingCaller] = []  # in the queue of users' claims
        self.failures: dict[str, str] = {}
        self.sources: set[str] = set()

    def read(self, source: str, how: Callable[[], _T], otherwise: _T) -> _T:
        """Return what a source says; note whether it failed."""
        self.note(source)
        try:
            return how()
        except (OSError, ValueError, Refusal) as fault:
            self.note(source, str(fault))
            return otherwise

    def note(self, source: str, fault: str = "") -> None:
        """Note that a source was asked, and why it failed."""
        self.sources.add(source)
        if fault:
            self.failures[source] = one_line(fault)


def read_local_state(node: Node, now: float) -> LocalState:
    """Read everything; never raises. `now` is CLOCK_BOOTTIME in seconds."""
    facts = LocalState()
    facts.locks = facts.read("locks", lambda: read_boot_locks(node), None)
    state_dir = node.settings.state_dir
    notes = facts.read("quarantine", lambda: read_device_notes(state_dir, QUARANTINE), None)
    if notes is not None:
        facts.quarantine_notes = notes
        facts.quarantined = {name: note_reason(note) for name, note in notes.items()}
    facts.closed = node_view.read_closed_cards(node)
    node_view.note_reservations(node, facts)
    nothing: Judged = (None, None)
    judged = facts.read("verdicts", lambda: node_view.read_node_verdicts(node, now), nothing)
    facts.verdicts, facts.reconciled = judged
    facts.cards = read_cards(state_dir, node.boot_id)
    facts.waiting = read_waiting(node)
    facts.counters = facts.read("counters", lambda: count_events(read_events(node.store.path)), {})
    return facts


def read_boot_locks(node: Node) -> dict[str, Lock]:
    """Return every lock; raise Refusal also where the records of this boot were lost.

    Then nothing is free: jobs run on devices that nobody can name. A boot_id that is there, and
    broken, costs the verdicts only.
    """
    missing = not os.path.lexists(f"{node.store.root}/boot_id")
    if missing and (lost := node_view.find_lost_records(node)):
        raise lost
    return node.store.read_detailed_locks()


def ledger_claims(
    locks: Mapping[str, Lock] | None, boot_id: str, now: float
) -> dict[str, LedgerClaim | None] | None:
    """Return who holds each device since when; None for one whose owner cannot be read. Pure.

    A token becomes the name of a file: one that may not be is as none.
    A claim of another boot is as old as we know it: its time is of another clock.
    """
    if locks is None:
        return None
    claims: dict[str, LedgerClaim | None] = {}
    for name, lock in locks.items():
        record = lock.owner
        if record is None or not is_claim_token(record.token):
            claims[name] = None
            continue
        ours = record.boot_id == boot_id and 0 < record.claimed_boottime <= now
        claims[name] = LedgerClaim(record.token, record.claimed_boottime if ours else now)
    return claims
