# SPDX-License-Identifier: Apache-2.0
"""What somebody must look at, below the table of `gpulock status`, with the next command. Pure."""

from __future__ import annotations

import os

from gpulock.alloc import states
from gpulock.alloc.states import DeviceState
from gpulock.cli.session import owns_lock_dir
from gpulock.cli.status.device_use import count_seen_foreign
from gpulock.cli.status.status_view import StatusView, find_stray_path
from gpulock.deadline import clock_boottime
from gpulock.errors import lost_records_refusal
from gpulock.node.context import Node
from gpulock.node.devices import SHARE
from gpulock.text.advice import (
    ADMINISTRATOR,
    NEEDS_INSTANCE,
    is_closed_by_mps,
    quarantine_end_condition,
    restore_hint,
)
from gpulock.text.words import (
    FORCE,
    format_count,
    format_device_label,
    format_duration,
    format_lock_holder,
)
from gpulock.workstation.waiting import read_waiting

ATTENTION = (states.MISSING, states.QUARANTINED, states.STALE, states.NOT_KNOWN, states.FOREIGN)
IN_USE = (states.HELD, states.HELD_IDLE)


def list_attention_facts(view: StatusView, rows: list[DeviceState]) -> list[tuple[str, str]]:
    """Return label and text of each such thing: first what stops every claim."""
    pairs = [
        *(("settings", f"{fault}; gpulock doctor") for fault in view.node.settings.faults),
        *list_store_faults(view),
    ]
    groups: dict[str, list[DeviceState]] = {}  # devices of one fate are told together
    for row in rows:
        if row.state in ATTENTION or is_closed_by_mps(row):
            foreign = format_foreign_processes(view, row)
            fate = f"{row.state} {row.reason} {foreign} {row_claim_key(row)}"
            groups.setdefault(fate, []).append(row)
    for same in groups.values():
        pairs.append((format_row_label(same), format_row_sentence(view, same[0])))
    for row in rows:
        if row.state in IN_USE and format_foreign_processes(view, row):
            pairs.append((format_row_label([row]), describe_foreign_use(view, row)))
    pairs += list_reserve_facts(rows)
    for one in view.reservations:
        pairs.append((format_device_label(one.device, view.devices), one.describe()))
    pairs += list_queue_facts(view.node)
    there = os.path.lexists(view.node.store.path)
    if there and view.use.sample is None and not owns_lock_dir(view.node):
        pairs.append(("foreign", "who uses a GPU without a claim is not known; root sees it"))
    return [*pairs, ("samples", view.use.why)] if view.use.why else pairs


def list_store_faults(view: StatusView) -> list[tuple[str, str]]:
    """Return what is wrong with LOCK_DIR and the records, so that nothing is granted."""
    path, faults = view.node.store.path, list[tuple[str, str]]()
    if view.is_read_only:
        why = f"{path} is mounted read-only: nothing is granted and nothing freed"
        faults.append(("LOCK_DIR", f"{why}; mount it writable"))
    if view.fault:
        why = "nothing is granted until it can be read; run gpulock doctor as root"
        faults.append(("LOCK_DIR", f"{view.fault}; {why}"))
    if view.lost:
        lost = lost_records_refusal(view.node.store.root)
        faults.append(("records lost", f"nothing is granted; {lost.do}"))
    if view.full:
        why = "it is full, no GPU is granted until there is room; df"
        faults.append(("LOCK_DIR", f"{why} {path}"))
    return faults


def list_reserve_facts(rows: list[DeviceState]) -> list[tuple[str, str]]:
    """Return who reserved which devices, and why, devices of one reason together."""
    groups: dict[str, list[DeviceState]] = {}
    for row in rows:
        record = row.lock.owner if row.lock else None
        if record is not None and record.is_reserve() and record.comment:
            groups.setdefault(f"reserved by {record.user}: {record.comment}", []).append(row)
    return [(format_row_label(same), text) for text, same in groups.items()]


def list_queue_facts(node: Node) -> list[tuple[str, str]]:
    """Return who waits in the queue of users' claims, the first by name."""
    callers = read_waiting(node.store.path, node.boot_id, node.proc.running)
    if not callers:
        return []
    first = callers[0]
    waited = format_duration(clock_boottime() - first.since)
    others = ""
    if len(callers) > 1:
        others = f"; {format_count(len(callers) - 1, 'other caller')}: gpulock queue"
    why = f": {first.why}" if first.why else ""
    return [("queue", f"{first.user} waits {waited} for {first.what}{why}{others}")]


def row_claim_key(row: DeviceState) -> str:
    """Return what tells the lock of a row from others, nothing where it has none."""
    if row.lock is None:
        return ""
    return row.lock.owner.token if row.lock.owner else row.id


def format_row_label(rows: list[DeviceState]) -> str:
    """Return what names rows in a line of their own."""
    names = [row.device.label() if row.device else row.id for row in rows]
    if rows[0].device is None:
        return rows[0].id if rows[0].lock else format_count(len(rows), "GPU")
    return f"GPU{'s' if len(rows) > 1 else ''} {', '.join(names)}"


def format_row_sentence(view: StatusView, row: DeviceState) -> str:
    """Return state, reason and the next command."""
    who = format_foreign_processes(view, row) if row.state == states.FOREIGN else ""
    reason = row.reason.replace("a process", who) if who else row.reason
    if find_stray_path(view.node, row.lock):
        return f"{row.state}: {reason}; gpulock why {format_row_label([row]).removeprefix('GPU ')}"
    if row.state == states.STALE and view.is_read_only:
        return f"{row.state}: {reason}; gpulock reap frees it once LOCK_DIR is writable"
    return f"{row.state}: {reason}; {next_command(row)}"


def describe_foreign_use(view: StatusView, row: DeviceState) -> str:
    """Return who is on a device that another one holds."""
    record = row.lock.owner if row.lock else None
    whose = f" of {format_lock_holder(record)}" if record else ""
    return (
        f"foreign: in use by {format_foreign_processes(view, row)}, not{whose}; {next_command(row)}"
    )


def format_foreign_processes(view: StatusView, row: DeviceState) -> str:
    """Return the foreign processes on a device as far as they were seen: `process 4711`."""
    seen = view.use.seen(row.id)
    count = count_seen_foreign(seen)
    if seen is None or not count:
        return ""
    if len(seen.foreign_pids) < count:
        named = f", such as {seen.foreign_pids[0]}" if seen.foreign_pids else ""
        return f"{format_count(count, 'process')}{named}"
    return f"process{'es' if count > 1 else ''} {', '.join(map(str, seen.foreign_pids))}"


def next_command(row: DeviceState) -> str:
    """Return what to do about a row that needs attention."""
    name = row.device.label() if row.device else row.id
    if row.state == states.STALE:
        what = "its place" if row.lock and SHARE in row.lock.id else "it"
        return f"the next claim or gpulock reap frees {what}"
    if row.state == states.MISSING:
        return f"gpulock why {name}" if row.lock else "look at dmesg for the card"
    if row.state == states.NOT_KNOWN and row.lock and row.lock.fault:
        return f"no reap frees it, but {FORCE.format(name)}"
    if row.state == states.QUARANTINED and not row.orphans:
        if row.lacks_instance():
            return f"look at {NEEDS_INSTANCE[1]}"
        if quarantine_end_condition(row.reason) == ADMINISTRATOR:
            return f"{restore_hint(row)} ends it"
        return f"gpulockd brings it back when it is clean, or {restore_hint(row)}"
    return f"gpulock why {name}"
