# SPDX-License-Identifier: Apache-2.0
"""What each share of a card did: work and memory go to the owner of each process.

What may be of several claims, or of a process that cannot be seen, is nobody's: the claims of the
card are then not observed, which is not idle. Reads of the processes go through `tree`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpulock.alloc.process_owner import is_claim_process, is_service_process
from gpulock.alloc.process_tree import ProcessTree
from gpulock.node.devices import SHARE
from gpulock.store.locks import Lock
from gpulock_exporter.state.device_totals import DeviceActivity
from gpulock_exporter.state.snapshot import DeviceProcesses
from gpulock_exporter.telemetry import Process

LEAST_TOLD: Final = 0.5  # of a card's work that is told of its processes; they have other samples
SERVICE, FOREIGN, UNKNOWN = "service", "foreign", "?"  # whose a process is, where no claim's


@dataclass
class SharedCard:
    """Who has places on a card: their locks, and the first of each claim by its token.

    `is_unread` is whether a lock's owner cannot be read.
    """

    locks: list[Lock] = field(default_factory=list[Lock])
    first: dict[str, Lock] = field(default_factory=dict[str, Lock])
    is_unread: bool = False

    def divide(
        self,
        look: DeviceActivity,
        use: Mapping[str, float] | None,
        on: DeviceProcesses | None,
        tree: ProcessTree,
        services: Sequence[str],
    ) -> dict[str, float]:
        """Return the seconds at work of each claim of which they are known, by token.

        `use` is by pid which part of the time since the last look each process worked.
        """
        if look.busy is None or not look.observed:
            return {}
        if not look.worked:
            return dict.fromkeys(self.first, 0.0)
        is_alone = len(self.first) == 1 and not self.is_unread
        if is_alone and on is not None and not on.foreign and not on.unseen:
            return dict.fromkeys(self.first, look.busy)
        if use is None or self.is_unread:
            return {}
        whose = {
            pid: find_process_claim(int(pid), self.first, tree, services)
            for pid, part in use.items()
            if part > 0
        }
        if UNKNOWN in whose.values():
            return {}
        told = look.observed * sum([use[pid] for pid in whose])
        # whether somebody worked of whom this does not tell: then nobody is known to be idle
        is_doubtful = FOREIGN in whose.values() or told < look.busy * LEAST_TOLD
        scale = look.observed * min(1.0, look.busy / told if told else 1.0)
        found: dict[str, float] = {}
        for token in self.first:
            part = sum([use[pid] for pid, of in whose.items() if of == token])
            if part or not is_doubtful:
                found[token] = part * scale
        return found

    def activity(
        self, look: DeviceActivity, worked: Mapping[str, float], on: DeviceProcesses | None
    ) -> dict[str, DeviceActivity]:
        """Return what each share did in a look at the card, by lock id."""
        found: dict[str, DeviceActivity] = {}
        for lock in self.locks:
            busy = worked.get(lock.owner.token) if lock.owner else None
            seen = 0.0 if busy is None else look.observed
            memory = on.share_memory.get(lock.id) if on else None
            found[lock.id] = DeviceActivity(look.since, look.at, busy, seen, memory=memory)
        return found


def list_shared_cards(locks: Mapping[str, Lock]) -> dict[str, SharedCard]:
    """Return the cards of which there are places, by bus id."""
    found: dict[str, SharedCard] = {}
    for name in sorted(locks):
        if SHARE in name:
            card, owner = (
                found.setdefault(name.partition(SHARE)[0], SharedCard()),
                locks[name].owner,
            )
            card.locks.append(locks[name])
            if owner is None:
                card.is_unread = True
            else:
                card.first.setdefault(owner.token, locks[name])
    return found


def find_process_claim(
    pid: int, first: Mapping[str, Lock], tree: ProcessTree, services: Sequence[str]
) -> str:
    """Return the token of the claim that a process is of, or SERVICE, FOREIGN, UNKNOWN.

    UNKNOWN is one that may be of several claims, cannot be seen, or has ended.
    """
    try:
        of = [token for token, lock in first.items() if is_claim_process(pid, lock, tree)]
        if not of:
            return SERVICE if is_service_process(pid, tree, services) else FOREIGN
    except (OSError, ValueError):
        return UNKNOWN
    return of[0] if len(of) == 1 else UNKNOWN


def sum_share_memory(
    listed: Sequence[Process], locks: Sequence[Lock], tree: ProcessTree
) -> dict[str, int]:
    """Return the bytes in use by the processes of each share, by lock id.

    A claim of several places has all on its first. What is of no share, or may be of several, is
    nobody's. Where the driver does not tell the memory of each process, nothing is known.
    """
    first = {one.owner.token: one for one in reversed(locks) if one.owner and SHARE in one.id}
    if not first or any(process.memory is None for process in listed):
        return {}
    found = {lock.id: 0 for lock in locks if SHARE in lock.id}
    for process in listed:
        whose = find_process_claim(process.pid, first, tree, ())
        if whose in first:
            found[first[whose].id] += process.memory or 0
    return found
