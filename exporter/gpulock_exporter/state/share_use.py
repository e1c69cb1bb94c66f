# SPDX-License-Identifier: Apache-2.0
"""What each share of a card did: work and memory go to the owner of each process.

What may be of several claims, or of a process that cannot be seen, is nobody's: the claims of the
card are then not observed, which is not idle. Reads of the processes go through `process_tree`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpulock.alloc.process_owner import is_claim_process, is_service_process
from gpulock.alloc.process_tree import ProcessTree
from gpulock.node.devices import SHARE
from gpulock.store.locks import Lock
from gpulock_exporter.state.device_totals import DeviceActivity
from gpulock_exporter.state.snapshot import DeviceProcesses
from gpulock_exporter.telemetry import DeviceTelemetry, Process

LEAST_TOLD: Final = 0.5  # of a card's work that is told of its processes; they have other samples
SERVICE, FOREIGN, UNKNOWN = "service", "foreign", "?"  # whose a process is, where no claim's


@dataclass
class CardSharers:
    """Who has places on a card: the claims, by token their first lock; `pids` are of the last look.

    `sole` is whether one claim alone had places from one look to the next, `unread` whether a
    lock's owner cannot be read.
    """

    locks: list[Lock]
    first: dict[str, Lock]
    pids: dict[int, str] = field(default_factory=dict[int, str])
    sole: bool = False
    unread: bool = False


@dataclass
class ShareUse:
    """The cards that are shared, from look to look.

    `ratios` has by lock id which part of the last look a claim worked, on its first place;
    `before` has the cards of the look before the last.
    """

    services: Sequence[str]
    process_tree: Callable[[], ProcessTree]
    cards: dict[str, CardSharers] = field(default_factory=dict[str, CardSharers])
    before: dict[str, CardSharers] = field(default_factory=dict[str, CardSharers])
    ratios: dict[str, float] = field(default_factory=dict[str, float])

    def follow(self, locks: Mapping[str, Lock] | None) -> bool:
        """Take the locks of a look; return whether any card is shared."""
        self.before, self.cards, self.ratios = self.cards, list_card_sharers(locks or {}), {}
        return bool(self.cards)

    def divide(
        self,
        looks: Mapping[str, DeviceActivity],
        devices: Mapping[str, DeviceTelemetry],
        present: Mapping[str, DeviceProcesses],
    ) -> dict[str, DeviceActivity]:
        """Return what each share did in the looks at the cards, by lock id."""
        found: dict[str, DeviceActivity] = {}
        for card, sharers in self.cards.items():
            look, known = looks.get(card), self.before.get(card)
            if look is None:
                continue
            sharers.sole = known is not None and {*known.first} == {*sharers.first}
            sharers.sole &= len(sharers.first) == 1 and not sharers.unread
            on = present.get(card)
            use = devices[card].process_use if card in devices else None
            worked = self._divide_look(look, sharers, known, use, on)
            for lock in sharers.locks:
                token = lock.owner.token if lock.owner else ""
                busy = worked.get(token)
                seen = 0.0 if busy is None else look.observed
                memory = on.share_memory.get(lock.id) if on else None
                found[lock.id] = DeviceActivity(look.since, look.at, busy, seen, memory=memory)
                if busy is not None and sharers.first.get(token) is lock:
                    self.ratios[lock.id] = busy / seen
        return found

    def _divide_look(
        self,
        look: DeviceActivity,
        sharers: CardSharers,
        known: CardSharers | None,
        use: Mapping[str, float] | None,
        on: DeviceProcesses | None,
    ) -> dict[str, float]:
        """Return the seconds at work of each claim of which they are known, by token."""
        if look.busy is None or not look.observed:
            return {}
        if not look.worked:
            return dict.fromkeys(sharers.first, 0.0)
        if sharers.sole and on is not None and not on.foreign and not on.unseen:
            return dict.fromkeys(sharers.first, look.busy)
        if use is None or sharers.unread:
            return {}
        tree, earlier = self.process_tree(), known.pids if known else {}
        parts = dict.fromkeys(sharers.first, 0.0)
        for pid in [int(word) for word, ratio in use.items() if ratio > 0]:
            whose = find_process_claim(pid, sharers.first, tree, self.services, earlier)
            if whose == UNKNOWN:
                return {}
            sharers.pids[pid] = whose
        for pid, whose in sharers.pids.items():
            if whose in parts:
                parts[whose] += use[str(pid)]
        told = look.observed * sum([use[str(pid)] for pid in sharers.pids])
        # whether somebody worked of whom this does not tell: then nobody is known to be idle
        doubt = FOREIGN in sharers.pids.values() or told < look.busy * LEAST_TOLD
        scale = look.observed * min(1.0, look.busy / told if told else 1.0)
        return {token: part * scale for token, part in parts.items() if part or not doubt}


def list_card_sharers(locks: Mapping[str, Lock]) -> dict[str, CardSharers]:
    """Return who has places on each card, by bus id."""
    found: dict[str, CardSharers] = {}
    for name in sorted(locks):
        if SHARE in name:
            sharers = found.setdefault(name.partition(SHARE)[0], CardSharers([], {}))
            sharers.locks.append(locks[name])
            owner = locks[name].owner
            if owner is None:
                sharers.unread = True
            else:
                sharers.first.setdefault(owner.token, locks[name])
    return found


def find_process_claim(
    pid: int,
    first: Mapping[str, Lock],
    tree: ProcessTree,
    services: Sequence[str],
    earlier: Mapping[int, str],
) -> str:
    """Return the token of the claim that a process is of, or SERVICE, FOREIGN, UNKNOWN.

    UNKNOWN is one that may be of several claims. One that has ended is whose it was `earlier`.
    """
    try:
        of = [token for token, lock in first.items() if is_claim_process(pid, lock, tree)]
        if not of:
            return SERVICE if is_service_process(pid, tree, services) else FOREIGN
    except (OSError, ValueError):
        return earlier.get(pid, UNKNOWN)
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
        whose = find_process_claim(process.pid, first, tree, (), {})
        if whose in first:
            found[first[whose].id] += process.memory or 0
    return found
