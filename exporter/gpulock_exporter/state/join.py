# SPDX-License-Identifier: Apache-2.0
"""The snapshot of a node at one moment: devices, locks, verdicts and use, joined.

The states are those of `gpulock.alloc.states`, from the facts that `gpulock status` has. NVML's
values that are older than a limit are left out; what the lock directory says stays.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gpulock.alloc import states
from gpulock.daemon.health.cards import FIRST_SXID
from gpulock.daemon.health.recovery import is_policy_note, parse_note_causes
from gpulock.node.devices import SHARE, Device, card_bus_id, lock_ids_overlap
from gpulock.node.shares import count_places_by_card
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.collector_state import CollectorState
from gpulock_exporter.state.local_state import LocalState
from gpulock_exporter.state.snapshot import (
    NOT_IN_NVML,
    DeviceSnapshot,
    ExporterHealth,
    Moment,
    NodeSnapshot,
)

# causes that are none of the policy's
ORPHANS, ADMINISTRATOR, NO_INSTANCE = "orphans", "administrator", "no_instance"


def take_snapshot(
    state: CollectorState,
    driver_devices: Sequence[Device] | None,
    facts: LocalState,
    now: Moment,
    health: ExporterHealth,
) -> NodeSnapshot:
    """Return what is to be told now; `health` has what the caller knows.

    `driver_devices` are those of the driver's own list, None where it is not known.
    """
    totals, offset = state.memory.totals, state.offset or 0.0
    fresh = state.is_fresh(now) and state.last is not None
    devices, state_counts = SnapshotJoin(state, facts, now, fresh).join(driver_devices)
    errors = facts.cards.xids
    return NodeSnapshot(
        at=now,
        devices=devices,
        states=state_counts,
        driver=state.last.driver if state.last and fresh else "",
        counters=facts.counters,
        waiting=tuple(facts.waiting),
        reservations=tuple(facts.reservations),
        switch_errors={of: one for of, one in errors.items() if of[1] >= FIRST_SXID},
        reconciled=facts.reconciled + offset if facts.reconciled is not None else None,
        health=replace(
            health,
            nvml_up=fresh,
            sampled=totals.at + offset if totals.at is not None else None,
        ),
    )


class SnapshotJoin:
    """What is known at one moment: NVML's last values, gpulock's files, and our memory.

    `fresh` says whether the last look is recent enough to be told, `since` is the oldest moment of
    which a counter may be, `at` when the last look was (CLOCK_BOOTTIME seconds).
    """

    def __init__(self, state: CollectorState, facts: LocalState, now: Moment, fresh: bool) -> None:
        self.facts, self.fresh, self.settings = facts, fresh, state.settings
        self.devices, self.models = state.devices, state.models
        self.totals, self.ledger = state.memory.totals, state.memory.ledger
        self.present = state.present()
        self.lost = {bus: one.why for bus, one in state.memory.lost.items()}
        self.since = now.boottime - self.settings.max_sample_age
        self.offset, self.at = state.offset or 0.0, self.totals.at or 0.0

    def join(
        self, driver_devices: Sequence[Device] | None
    ) -> tuple[tuple[DeviceSnapshot, ...], Mapping[str, int] | None]:
        """Return the devices, and how many are in each state."""
        nvml_now = self.devices if self.fresh else None
        devices = merge_device_lists(driver_devices, nvml_now, self.devices, self.lost)
        rows = self._judge(devices)
        snapshots = [self._device(row) for row in name_missing_rows(rows, self.totals.devices)]
        known = {one.id for one in snapshots}
        for name in nvml_now or ():  # a card in MIG mode, or one that has no row yet
            if name not in known:
                snapshots.append(self._device(states.DeviceState(name, None, None, "", "")))
        places = count_places_by_card(devices or (), self.settings.shares)
        for one in snapshots:
            one.places = places.get(one.id)
        snapshots.sort(key=device_sort_key)
        known_facts = None not in (self.facts.locks, self.facts.quarantined, devices)
        return tuple(snapshots), states.count_device_states(rows) if known_facts else None

    def _judge(self, devices: list[Device] | None) -> list[states.DeviceState]:
        """Return one row a device, as `gpulock.alloc.states` judges."""
        foreign = frozenset(name for name, on in self.present.items() if on.foreign)
        idle = frozenset[str]()
        if self.fresh:
            held = self.facts.held.items()
            idle = frozenset(name for name, lock in held if self._is_idle(name, lock))
        expected = self.settings.expected_gpus if devices is not None else 0
        return states.device_states(devices or [], self.facts, expected, foreign, idle)

    def _is_idle(self, name: str, lock: Lock) -> bool:
        """Return whether a locked device is observed to do nothing, and was for long."""
        idle = self._idle_seconds(name, lock.owner) if lock.owner else None
        return idle is not None and idle >= self.settings.idle_after

    def _idle_seconds(self, name: str, record: Owner) -> float | None:
        """Return the observed seconds since a device, or a share, last worked for its claim.

        Of one that is not observed any more nobody knows. A reserve is to rest, so it idles never.
        """
        use = self.ledger.of(name, record.token)
        if (
            record.is_reserve()
            or use is None
            or use.seen is None
            or self.at - use.seen > self.settings.max_sample_age
        ):
            return None
        return use.idle

    def _idle_since(self, name: str, record: Owner) -> float | None:
        """Return the last look less the observed idle seconds; None where that is too old."""
        idle = self._idle_seconds(name, record) if self.fresh else None
        return None if idle is None else self.at + self.offset - idle

    def _card_number(self, row: states.DeviceState, values: DeviceTelemetry | None) -> int | None:
        """Return the number of a device's card, None where it has none or nobody knows."""
        known = self.totals.numbers.get(card_bus_id(row.id))
        if known is not None and (row.device is None or row.device.index >= 0):
            return known
        one = row.device or values or self.totals.devices.get(row.id)
        return one.index if one and one.index >= 0 else None

    def _device(self, row: states.DeviceState) -> DeviceSnapshot:
        """Return one device with all that is known of it."""
        counted = self.totals.devices.get(row.id)
        values = self.devices.get(row.id) if self.fresh else None
        record = row.lock.owner if row.lock else None
        uuid = row.device.uuid if row.device else ""
        if row.lock and record and not row.device:
            uuid = record.uuid_of(row.lock.id)
        use = self.ledger.of(row.id, record.token) if record else None
        bus, dot, part = row.id.partition(".gi")
        device = DeviceSnapshot(**vars(values or DeviceTelemetry(bus, "", -1)))
        device.name = device.name or self.models.get(row.id, row.device.model if row.device else "")
        device.id, device.answered, device.reason = row.id, values is not None, row.reason
        if self.fresh or bus in self.lost:
            device.responding = values is not None and bus not in self.lost
        device.uuid = (counted.uuid if counted else "") or device.uuid or uuid or row.id
        device.card, device.instance = self._card_number(row, values), f"{dot}{part}"[1:]
        card = "" if device.card is None else str(device.card)
        device.gpu_label = f"{card}:{device.instance}" if device.instance else card
        on = self.present.get(row.id) if self.fresh else None
        if on and (on.foreign or not on.unseen):  # none to be seen is not none at all
            device.foreign = len(on.foreign)
        if self.facts.locks is not None:
            device.state, device.lock = row.state or None, row.lock
            device.sharers = {o.id: o.owner for o in row.locks() if o.owner and SHARE in o.id}
            device.owner = None if device.sharers else record
            memory: Mapping[str, int] = on.share_memory if on else {}
            device.share_memory = {name: memory[name] for name in device.sharers if name in memory}
            idle = {name: self._idle_since(name, of) for name, of in device.sharers.items()}
            device.share_idle_since = {name: at for name, at in idle.items() if at is not None}
            if device.owner is not None:
                device.idle_since = self._idle_since(row.id, device.owner)
        if row.id in self.facts.cards.states:
            device.checks = self.facts.cards.states[row.id].checks
        device.xids = {
            number: (times, at + self.offset)
            for (of, number), (times, at) in self.facts.cards.xids.items()
            if of == row.id
        }
        if row.state and self.facts.quarantine_notes is not None:
            device.causes = find_quarantine_causes(row, self.facts.quarantine_notes)
        if use is not None:
            device.mean = use.mean
        if counted:
            device.counters = counted.counts(self.since) if values else {}
            device.last_busy = (
                None if counted.last_busy is None else counted.last_busy + self.offset
            )
        return device


def device_sort_key(seen: DeviceSnapshot) -> tuple[bool, int, list[int], str]:
    """Return what devices are told in order of: gi10 comes after gi2."""
    numbers = [int(part) for part in re.findall(r"\d+", seen.instance)]
    return seen.card is None, seen.card or 0, numbers, seen.id


def name_missing_rows(
    rows: Sequence[states.DeviceState], counted: Collection[str]
) -> list[states.DeviceState]:
    """Return the rows that stand for a device of a name.

    One that is only known to be missing gets that of a device which was here in this boot
    (`counted`) and is gone, in order of their places.
    """
    named = [row for row in rows if row.device or row.lock]
    unnamed = [row for row in rows if not (row.device or row.lock)]
    if not unnamed:
        return named
    here = {row.id.partition(".gi")[0] for row in named}
    gone = [name for name in sorted(counted) if ".gi" not in name and name not in here]
    given = zip(unnamed, gone)
    return named + [
        states.DeviceState(name, None, None, row.state, row.reason) for row, name in given
    ]


def find_quarantine_causes(
    row: states.DeviceState, notes: Mapping[str, Mapping[str, str]]
) -> tuple[str, ...]:
    """Return why a device is out of service, also one that is missing besides: a word each.

    `notes` are by lock id. What is not the policy's is an administrator's.
    """
    causes = [ORPHANS] if row.orphans else []
    if row.state == states.QUARANTINED and row.lacks_instance():
        causes.append(NO_INSTANCE)
    for name, note in notes.items():
        if lock_ids_overlap(name, row.id):
            causes += parse_note_causes(note) if is_policy_note(note) else (ADMINISTRATOR,)
    return tuple(dict.fromkeys(causes))


def merge_device_lists(
    driver_devices: Sequence[Device] | None,
    nvml_now: Mapping[str, DeviceTelemetry] | None,
    nvml_last: Mapping[str, DeviceTelemetry],
    lost: Mapping[str, str],
) -> list[Device] | None:
    """Return the driver's own devices, with what NVML adds; None where they are not known.

    `nvml_now` is None where NVML is not heard now, `nvml_last` is what it said last. A card that
    the driver lists and NVML does not is faulty: one off the bus shows like that. `lost` says why.
    """
    if driver_devices is None:
        return None
    result: list[Device] = []
    for one in driver_devices:
        device = copy.copy(one)
        seen = nvml_last.get(device.id)
        if seen is not None:
            device.uuid = seen.uuid or device.uuid
            device.model = device.model or seen.name
        absent = nvml_now is not None and device.id not in nvml_now
        if (absent or device.bus in lost) and not device.fault:
            device.fault = lost.get(device.bus, NOT_IN_NVML)
        result.append(device)
    return result
