# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --json`: version 1 of the schema in docs/status-json.md."""

from __future__ import annotations

import json
from collections.abc import Iterable

from gpulock.alloc import states
from gpulock.alloc.shares import card_share_room
from gpulock.alloc.states import DeviceState
from gpulock.cli.status.device_use import SampleView, count_seen_foreign
from gpulock.cli.status.status_view import StatusView
from gpulock.store.locks import Lock
from gpulock.store.owner import TYPES, Owner
from gpulock.text.words import held_seconds
from gpulock.workstation.waiting import read_waiting

VERSION = 1
RESERVED = ("device", "uid", "user", "begin", "end")
CALLER = ("number", "uid", "user", "pid", "what", "why")


def format_status_json(view: StatusView, rows: list[DeviceState], shown: list[DeviceState]) -> str:
    """Return the document: devices of `shown`, totals of `rows`."""
    node = view.node
    room, use = card_share_room(rows, view.held, node.settings.shares), view.use
    sample: dict[str, object] | None = None  # where no exporter runs
    if use.sample is not None or use.why:
        age = round(use.age, 3) if use.age is not None else None
        sample = {"fresh": use.sample is not None, "age_seconds": age, "reason": use.why}
    cards = {row.device.bus if row.device else row.id for row in rows}
    document = {
        "version": VERSION,
        "node": node.name,
        "boot_id": node.boot_id,
        "settings_faults": list(node.settings.faults),
        "sample": sample,
        "reservations": [
            {**pick_fields(one, RESERVED), "comment": one.why} for one in view.reservations
        ],
        "waiting": [
            {**pick_fields(one, CALLER), "since": round(one.since - view.boottime + view.now, 3)}
            for one in read_waiting(node)
        ],
        "gpus": [status_device_entry(view, row, room.get(row.id)) for row in shown],
        "totals": {
            **states.count_device_states(rows),
            "expected": node.settings.expected_gpus or len(cards),
        },
    }
    return json.dumps(document, indent=2)


def status_device_entry(
    view: StatusView, row: DeviceState, room: tuple[int, int] | None
) -> dict[str, object]:
    """Return one device; what is not known is null. `room` are its shares, and the free ones."""
    device = row.device
    record = row.lock.owner if row.lock else None
    seconds: float | None = None
    if record is not None:
        seconds = round(held_seconds(record, view.node.boot_id, view.boottime, view.now), 3)
    return {
        "index": device.index if device else None,
        "id": row.id,
        "uuid": (device.uuid or None) if device else None,
        "minor": device.minor if device and device.minor >= 0 else None,
        "model": (device.model or None) if device else None,
        "numa_node": device.numa if device and device.numa >= 0 else None,
        "memory_mib": (device.memory_mib or None) if device else None,
        "state": row.state,
        "reason": row.reason,
        "held": owner_entry(view, record) if record else None,
        "holders": [
            {**owner_entry(view, lock.owner), "use": claim_use_entry(view.use, lock)}
            for lock in row.locks()
            if lock.owner
        ],
        "held_seconds": seconds,
        "shares": {"places": room[0], "free": room[1]} if room else None,
        "use": status_use_entry(view, row),
    }


def pick_fields(one: object, keys: Iterable[str]) -> dict[str, object]:
    """Return some fields of a record, by name."""
    return {key: getattr(one, key) for key in keys}


def owner_entry(view: StatusView, record: Owner) -> dict[str, object]:
    """Return who holds a device, or a share of it; `until` as epoch seconds."""
    entry = pick_fields(record, [key for key in TYPES if key != "note"])
    entry["comment"] = record.note or record.comment
    if record.until:
        entry["until"] = round(view.now + record.until - view.boottime, 3)
    return entry


def status_use_entry(view: StatusView, row: DeviceState) -> dict[str, object] | None:
    """Return what the exporter tells of a device; null where it told nothing, or long ago."""
    use = view.use
    seen = use.seen(row.id)
    if seen is None:
        return None
    last = seen.last_busy
    return {
        "utilization": seen.utilization,
        "memory_used_bytes": seen.memory_used,
        "memory_total_bytes": seen.memory_total,
        "power_watts": seen.power,
        "temperature_celsius": seen.temperature,
        "last_busy": round(last - view.boottime + view.now, 3) if last is not None else None,
        "processes": seen.processes,
        "foreign_processes": count_seen_foreign(seen),
        "foreign_pids": list(seen.foreign_pids),
        **claim_use_entry(use, row.lock if row.lock and row.lock.id == row.id else None),
    }


def claim_use_entry(use: SampleView, lock: Lock | None) -> dict[str, object]:
    """Return what a device did for the claim of a lock; what is not known is null."""
    account = use.account(lock.id, lock) if lock else None
    return {
        "idle_seconds": use.idle(lock.id, lock) if lock else None,
        "busy_seconds": account.busy if account else None,
        "observed_seconds": account.observed if account else None,
        "memory_peak_bytes": account.memory_peak if account else None,
    }
