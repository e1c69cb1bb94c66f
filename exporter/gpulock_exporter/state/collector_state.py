# SPDX-License-Identifier: Apache-2.0
"""What the exporter keeps from tick to tick: frames and facts go in, `join` makes snapshots of it.

A tick is a second, with a frame or without: a driver that hangs makes its values old, and the
locks go on. Nothing is read or written here but, through `process_scan`, the processes on a device:
that comes before the tick, since it may take long.

Of a card that claims share the driver tells as a whole. Where it was at rest, so was each claim on
it; where one claim alone is on it, all of it was that claim's work. Else the claims are not
observed, which is not idle. Memory goes to the owner of each process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Optional

from gpulock.alloc.process_owner import FOREIGN, GONE, UNSEEN, classify_process, is_claim_process
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.devices import SHARE, card_bus_id, lock_ids_overlap
from gpulock.node.settings import Settings
from gpulock.store.locks import Lock
from gpulock_exporter.frame import COLLECTORS, DeviceTelemetry, Frame
from gpulock_exporter.state.claim_accounting import Accounts, Ledger
from gpulock_exporter.state.device_totals import DeviceActivity, TelemetryTotals
from gpulock_exporter.state.local_state import LocalState, ledger_claims
from gpulock_exporter.state.snapshot import (
    NOT_IN_NVML,
    DeviceProcesses,
    LostCard,
    Moment,
    steady_offset,
)

LISTS_MISSED = 2  # process lists that did not come, after which the last one is not told any more


@dataclass
class ExporterMemory:
    """What the exporter remembers from one tick to the next, also over a restart."""

    totals: TelemetryTotals = field(default_factory=TelemetryTotals)
    ledger: Ledger = field(default_factory=Ledger)
    lost: Mapping[str, LostCard] = field(default_factory=dict[str, LostCard])  # by bus id
    sequence: int = 0


@dataclass(frozen=True)
class ProcessList:
    """The processes on a device as NVML listed them last, and the claims they were judged by."""

    processes: Mapping[int, int | None]
    at: float | None = None  # CLOCK_BOOTTIME seconds
    tokens: frozenset[str] = frozenset()
    who: DeviceProcesses | None = None


# a frame, None where none came, and the lists that are known then, by lock id
ClassifiedFrame = tuple[Optional[Frame], Mapping[str, ProcessList]]


class CollectorState:
    """The exporter's memory and what the driver said last.

    `process_scan` makes a fresh look at processes. It is asked when a list is new, when other
    claims hold the device, and after locks could not be read. Where frames no longer come, it is
    asked on each tick while a foreign process is there. `models` are by id, also of what is gone.
    """

    def __init__(
        self,
        boot_id: str,
        settings: Settings,
        process_scan: Callable[[], ProcessScan],
        memory: ExporterMemory | None = None,
    ) -> None:
        self.boot_id, self.settings = boot_id, settings
        self.memory = memory or ExporterMemory()
        self.devices: Mapping[str, DeviceTelemetry] = {}
        self.process_lists: Mapping[str, ProcessList] = {}
        self.last: Frame | None = None
        self.models: dict[str, str] = {}
        self.offset: float | None = None
        self._process_scan = process_scan

    def classify_frames(
        self, frames: Sequence[Frame], facts: LocalState, now: Moment
    ) -> list[ClassifiedFrame]:
        """Return each frame, or that none came, with the processes of that time. Changes nothing.

        It is as slow as /proc: a process that hangs in the driver may hold what its files wait for.
        """
        lists, classified = self.process_lists, list[ClassifiedFrame]()
        for frame in frames:
            at = self.memory.totals.time_of(frame, now.boottime)
            lists = self._classify_processes(self._take_process_lists(lists, frame, at), facts)
            classified.append((frame, lists))
        if classified:
            return classified
        if not self.is_fresh(now):  # no list comes that says who has ended
            lists = {
                name: replace(one, who=None) if one.who and one.who.foreign else one
                for name, one in lists.items()
            }
        return [(None, self._classify_processes(lists, facts))]

    def tick(
        self,
        frames: Sequence[ClassifiedFrame],
        facts: LocalState,
        now: Moment,
        hung: Mapping[str, str] | None = None,
        driver_cards: Collection[str] | None = None,
    ) -> dict[str, Accounts]:
        """Take the looks of this tick, oldest first; return the accounts of claims now over.

        `hung` has why a card is left out of the frames, by bus id; `driver_cards` are the bus ids
        of the cards that the driver lists, None where that is not known.
        """
        self.offset = steady_offset(self.offset, now)
        held = ledger_claims(facts.locks, self.boot_id, now.boottime)
        totals, ledger = self.memory.totals, self.memory.ledger
        over: dict[str, Accounts] = {}
        for frame, lists in frames:
            self.process_lists = lists
            if frame is None:
                over |= ledger.advance(held, None, now.boottime)
                continue
            self.last = frame
            self.devices = {one.lock_id: one for one in frame.devices}
            self.models |= {name: one.name for name, one in self.devices.items() if one.name}
            done = totals.advance(frame, self.devices, now.boottime)
            present = self.present()
            done |= share_activity(facts.locks or {}, done, present)
            strangers = {name for name, on in present.items() if on.foreign}
            strangers |= {name for name in done if card_bus_id(name) in strangers}
            over |= ledger.advance(held, done, totals.at or now.boottime, frozenset(strangers))
        fresh = self.last if self.is_fresh(now) else None
        answering = {card_bus_id(name) for name in self.devices}
        why = find_lost_cards(self.memory.lost, fresh, answering, driver_cards) | dict(hung or {})
        before = {bus: one.since for bus, one in self.memory.lost.items()}
        self.memory.lost = {
            bus: LostCard(before.get(bus, now.boottime), words) for bus, words in why.items()
        }
        self.memory.sequence += 1
        return over

    def is_fresh(self, now: Moment) -> bool:
        """Return whether the last frame is recent enough to be told."""
        looked = self.memory.totals.at
        return looked is not None and looked >= now.boottime - self.settings.max_sample_age

    def present(self) -> dict[str, DeviceProcesses]:
        """Return who is on each device, as far as that is known."""
        return {name: one.who for name, one in self.process_lists.items() if one.who is not None}

    def _take_process_lists(
        self, before: Mapping[str, ProcessList], frame: Frame, at: float
    ) -> dict[str, ProcessList]:
        """Return the process lists of a frame; of a device that has none, what was listed before.

        For a while: where the next list fails as well, who is on the device is not known. The
        frame with that list may be late by `max_sample_age`.
        """
        kept_for = LISTS_MISSED * self.settings.process_period + self.settings.max_sample_age
        lists: dict[str, ProcessList] = {}
        for device in frame.devices:
            name, last = device.lock_id, before.get(device.lock_id)
            if device.processes is not None:
                lists[name] = ProcessList(device.processes, at)
            elif last is not None and at - (last.at or at) <= kept_for:
                lists[name] = last
        return lists

    def _classify_processes(
        self, lists: Mapping[str, ProcessList], facts: LocalState
    ) -> dict[str, ProcessList]:
        """Return the lists with whose the processes are, where list or holder is another one."""
        classified, locks = dict(lists), facts.locks

        def classify() -> None:
            tree: ProcessScan | None = None
            for name, one in lists.items():
                if locks is None:
                    classified[name] = replace(one, who=None)
                    continue
                holders = [lock for at, lock in sorted(locks.items()) if lock_ids_overlap(at, name)]
                tokens = frozenset(lock.owner.token if lock.owner else "" for lock in holders)
                if one.who is None or one.tokens != tokens:
                    tree = tree or self._process_scan()
                    services = self.settings.allowed_processes
                    who = classify_device_processes(one.processes, holders, tree, services)
                    classified[name] = replace(one, who=replace(who, at=one.at), tokens=tokens)

        facts.read("foreign", classify, None)
        return classified

    def collectors(self, facts: LocalState, fresh: bool) -> dict[str, str]:
        """Return the fault of each part of a tick, the worker's while it is heard."""
        faults = {**dict.fromkeys(sorted(facts.sources), ""), **facts.failures}
        if fresh and self.last is not None:  # of collectors that there are: a name becomes a label
            faults |= {name: self.last.failures.get(name, "") for name in COLLECTORS}
        return faults


def find_lost_cards(
    before: Mapping[str, LostCard],
    frame: Frame | None,
    answering: Collection[str],
    driver_cards: Collection[str] | None,
) -> dict[str, str]:
    """Return why each card is lost, by bus id: those that a frame calls lost, or lacks. Pure.

    `frame` is None where none is fresh, `driver_cards` where the driver's list is not known. What
    was lost before, and is listed, stays lost until it is among those `answering`.
    """
    why = {
        bus: one.why for bus, one in before.items() if driver_cards is None or bus in driver_cards
    }
    if frame is None:
        return why
    absent = dict.fromkeys(driver_cards or () if frame.complete else (), NOT_IN_NVML)
    known = {bus: words for bus, words in {**absent, **why}.items() if bus not in answering}
    return {**known, **frame.lost}


def classify_device_processes(
    listed: Mapping[int, int | None],
    locks: Sequence[Lock],
    tree: ProcessScan,
    services: Sequence[str],
) -> DeviceProcesses:
    """Return who is on a device, `locks` being those on it, on its card or its instances.

    NVML tells pids, /proc tells the rest. What cannot be seen is not foreign: it is counted apart.
    """
    kind_by_pid = {pid: classify_process(pid, locks, tree, services) for pid in listed}
    foreign = tuple(sorted(pid for pid, of in kind_by_pid.items() if of == FOREIGN))
    kinds, memory = list(kind_by_pid.values()), sum_share_memory(listed, locks, tree)
    return DeviceProcesses(
        len(kind_by_pid) - kinds.count(GONE), foreign, kinds.count(UNSEEN), share_memory=memory
    )


def share_activity(
    locks: Mapping[str, Lock],
    activities: Mapping[str, DeviceActivity],
    present: Mapping[str, DeviceProcesses],
) -> dict[str, DeviceActivity]:
    """Return what each share did in the looks at the cards, by lock id. Pure."""
    claims: dict[str, set[str]] = {}  # by bus id; each lock whose owner cannot be read is one more
    for name, lock in locks.items():
        bus, share, _ = name.partition(SHARE)
        if share and bus in activities:
            claims.setdefault(bus, set()).add(lock.owner.token if lock.owner else name)
    shares: dict[str, DeviceActivity] = {}
    for name in locks:
        bus = name.partition(SHARE)[0]
        if bus == name or bus not in claims:
            continue
        card, on = activities[bus], present.get(bus)
        busy = card.busy if card.worked else 0.0
        is_alone = len(claims[bus]) == 1 and on is not None and not (on.foreign or on.unseen)
        if card.busy is None or (card.worked and not is_alone):
            busy = None
        seen = 0.0 if busy is None else card.observed
        memory = on.share_memory.get(name) if on else None
        shares[name] = DeviceActivity(card.since, card.at, busy, seen, memory=memory)
    return shares


def sum_share_memory(
    listed: Mapping[int, int | None], locks: Sequence[Lock], tree: ProcessScan
) -> dict[str, int]:
    """Return the bytes in use by the processes of each share, by lock id.

    A claim of several places has all on its first. What is of no share, or may be of several, is
    nobody's. Where the driver does not tell the memory of each process, nothing is known.
    """
    first = {one.owner.token: one for one in reversed(locks) if one.owner and SHARE in one.id}
    if not first or None in listed.values():
        return {}
    used = {lock.id: 0 for lock in locks if SHARE in lock.id}
    for pid, memory in listed.items():
        try:
            of = [one for one in first.values() if is_claim_process(pid, one, tree)]
        except (OSError, ValueError):  # it has ended, or is hidden
            continue
        if len(of) == 1:
            used[of[0].id] += memory or 0
    return used
