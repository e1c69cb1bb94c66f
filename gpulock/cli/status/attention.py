# SPDX-License-Identifier: Apache-2.0
"""What somebody must look at, what would free a device, and the next command. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from gpulock.alloc import states
from gpulock.alloc.states import DeviceState
from gpulock.cli.session import owns_lock_dir
from gpulock.cli.status.device_use import count_seen_foreign
from gpulock.cli.status.status_view import StatusView
from gpulock.daemon.core.instance_lock import find_running_daemon
from gpulock.deadline import clock_boottime
from gpulock.node.context import Node
from gpulock.store.locks import Lock
from gpulock.store.quarantine import POLICY
from gpulock.store.verdicts import FRESH, process_in_proof, read_dated_verdicts
from gpulock.text.words import (
    FORCE,
    format_count,
    format_device_label,
    format_duration,
    format_lock_holder,
)
from gpulock.workstation.waiting import KEPT, is_stopped, read_waiting

ATTENTION = (states.MISSING, states.QUARANTINED, states.STALE, states.NOT_KNOWN, states.FOREIGN)
IN_USE = (states.HELD, states.HELD_IDLE)
# what only root may do
ROOTS = re.compile("gpulock (reap|release|restore|unreserve|quarantine) ?")
ADMINISTRATOR = "an administrator"  # only an administrator restores what an administrator took out
REQUEST = "gpulock run -n 1 --wait -- COMMAND"
NEEDS_INSTANCE = ("a MIG instance that the exporter tells, or MIG mode off", "nvidia-smi mig -lgi")


def list_attention_facts(view: StatusView, rows: list[DeviceState]) -> list[tuple[str, str]]:
    """Return label and text of each such thing: first what stops every claim."""
    pairs = [
        *(("settings", f"{fault}; gpulock doctor") for fault in view.node.settings.faults),
        *list_store_faults(view),
    ]
    groups: dict[str, list[DeviceState]] = {}  # devices of one fate are told together
    for row in rows:
        closed_by_mps = row.state == states.HELD and not row.lock and not row.reserved
        if row.state in ATTENTION or closed_by_mps:
            foreign = format_foreign_processes(view, row)
            claim = (row.lock.owner.token if row.lock.owner else row.id) if row.lock else ""
            fate = f"{row.state} {row.reason} {foreign} {claim}"
            groups.setdefault(fate, []).append(row)
    for same in groups.values():
        pairs.append((format_row_label(same), format_row_sentence(view, same[0])))
    for row in rows:
        if row.state in IN_USE and (who := format_foreign_processes(view, row)):
            record = row.lock.owner if row.lock else None
            whose = f" of {format_lock_holder(record)}" if record else ""
            text = f"foreign: in use by {who}, not{whose}; gpulock why {row_name(row)}"
            pairs.append((format_row_label([row]), text))
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
    path = view.node.store.path
    lost = f"nothing is granted; {view.lost.do}" if view.lost else ""
    unread = "nothing is granted until it can be read; run gpulock doctor as root"
    full = "it is full, no GPU is granted until there is room; df"
    faults = (
        (view.fault, "records", f"{view.fault}; {unread}"),
        (lost, "records lost", lost),
        (view.full, "LOCK_DIR", f"{full} {path}"),
    )
    return [(label, text) for wrong, label, text in faults if wrong]


def list_reserve_facts(rows: list[DeviceState]) -> list[tuple[str, str]]:
    """Return who reserved which devices, and why, devices of one reason together."""
    groups: dict[str, list[DeviceState]] = {}
    for row in rows:
        record = row.lock.owner if row.lock else None
        if record is not None and record.is_reserve() and record.comment:
            groups.setdefault(f"reserved by {record.user}: {record.comment}", []).append(row)
    return [(format_row_label(same), text) for text, same in groups.items()]


def why_not_served(node: Node) -> str:
    """Return why gpulockd grants nothing to a user who needs it, nothing where it may."""
    path, boottime = node.store.path, clock_boottime()
    if not node.settings.user_claims or owns_lock_dir(node) or not os.path.lexists(path):
        return ""
    what = "does not run"
    if pid := find_running_daemon(path, node.settings.proc_root):
        reaped = read_dated_verdicts(path, boottime, node.boot_id)[1]
        if not is_stopped(node, pid) and (reaped is None or boottime - reaped <= FRESH):
            return ""
        what = f"pid {pid} does not answer"
    return f"{what}: nothing is granted; ask root to start it again"


def list_queue_facts(node: Node) -> list[tuple[str, str]]:
    """Return that nobody serves the queue of users' claims, or who waits.

    Named is the first, or for whom free devices are kept: those before that one let others by.
    """
    if why := why_not_served(node):
        return [("gpulockd", why)]
    callers = read_waiting(node)
    if not callers:
        return []
    first = next((one for one in callers if one.why.startswith(KEPT)), callers[0])
    waited = format_duration(clock_boottime() - first.since)
    others = ""
    if len(callers) > 1:
        others = f"; {format_count(len(callers) - 1, 'other caller')}: gpulock queue"
    why = f": {first.why}" if first.why else ""
    return [("queue", f"{first.user} waits {waited} for {first.what}{why}{others}")]


def format_row_label(rows: list[DeviceState]) -> str:
    """Return what names rows in a line of their own."""
    names = [row_name(row) for row in rows]
    if rows[0].device is None:
        return rows[0].id if rows[0].lock else format_count(len(rows), "GPU")
    return f"GPU{'s' if len(rows) > 1 else ''} {', '.join(names)}"


def format_row_sentence(view: StatusView, row: DeviceState) -> str:
    """Return state, reason and the next command: `why`, where that needs its evidence."""
    who = format_foreign_processes(view, row) if row.state == states.FOREIGN else ""
    reason = row.reason.replace("a process", who) if who else row.reason
    said = row.lock is None or row.lock.fault or row.state in (states.STALE, states.QUARANTINED)
    if not said or row.orphans or row.state in (states.FOREIGN, states.HELD):
        return f"{row.state}: {reason}; gpulock why {row_name(row)}"
    *freed, (_, command) = list_next_steps(view, row)
    how = "".join([f"{label} {text}; " for label, text in freed])
    return f"{row.state}: {reason}; {how}{command}"


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


def row_name(row: DeviceState) -> str:
    """Return what an argument of a command calls a device."""
    return row.device.label() if row.device else row.id


def list_next_steps(
    view: StatusView, row: DeviceState, pids: Sequence[int] = ()
) -> list[tuple[str, str]]:
    """Return what frees a device that is not free, or brings it back; then the next command.

    `pids` are processes that have it open and ought not to.
    """
    label, (how, command) = "freed by", find_release_way(view, row, pids)
    if row.state == states.QUARANTINED and not row.orphans:
        label = "back by"
    elif row.lock is None and row.state != states.HELD:
        return [("next", command_for_caller(view.node, command))]
    return [(label, how), ("next", command_for_caller(view.node, command))]


def command_for_caller(node: Node, command: str) -> str:
    """Return a next command, for who may not change locks whose it is: root's, or gpulockd's."""
    if owns_lock_dir(node):
        return command
    if find_running_daemon(node.store.path, node.settings.proc_root):
        command = command.replace("then gpulock reap", "then gpulockd frees it")
        if command == "gpulock reap":
            return "nothing: gpulockd does it"
    return f"ask root: {command}" if ROOTS.search(command) else command


def find_release_way(view: StatusView, row: DeviceState, pids: Sequence[int]) -> tuple[str, str]:
    """Return (what frees a device or brings it back, next command)."""
    name, lock = row_name(row), row.lock
    if row.state == states.MISSING and (row.device or not lock):
        return "a driver that can read the card again", "look at dmesg for NVRM and Xid"
    if row.state == states.MISSING and lock and not lock.fault:
        return "the end of its job", f"gpulock reap, or {FORCE.format(name)}"
    if row.state == states.FOREIGN or row.orphans:
        end = f"end process {pids[0]} (ps -fp {pids[0]} shows it)" if pids else "end that process"
        then = ", then gpulock reap" if lock else f', or gpulock quarantine {name} --reason "TEXT"'
        return "a reap, once no process has it open", end + then
    if row.state == states.QUARANTINED:
        back = quarantine_end_condition(row.reason), restore_command(row)
        return NEEDS_INSTANCE if row.lacks_instance() else back
    if row.state == states.STALE:
        return "the next claim that needs it, or a reap", "gpulock reap"
    if lock is None:
        return (
            ("its user, or the end of that time", REQUEST)
            if row.reserved
            else ("the end of that MPS, by gpulockd", "gpulock doctor")
        )
    return find_holder_way(view, row, lock)


def find_holder_way(view: StatusView, row: DeviceState, lock: Lock) -> tuple[str, str]:
    """Return the same of a device whose holder may live."""
    name, record = row_name(row), lock.owner
    if lock.fault:
        return "an administrator: no reap frees what it cannot read", FORCE.format(name)
    if record is None:
        return "a reap, where no claim is at work", "gpulock reap"
    if row.state == states.NOT_KNOWN and record.scheduler == "process":
        user = record.user
        return f"a reap that sees all processes of {user}; root may end them", f"ps -fu {user}"
    if row.state == states.NOT_KNOWN:
        return "a reap that can prove its end", f"gpulock reap, or {FORCE.format(name)}"
    if record.scheduler == "admin":
        return "an administrator", f"gpulock unreserve {name}"
    verdict = (view.verdicts or {}).get(record.token)
    proof = verdict.proof if verdict else ""
    if record.scheduler == "process":
        pid = process_in_proof(proof) or record.pid
        return "the end of the claim's last process", f"look at it: ps -fp {pid}"
    if record.draining or "without a shepherd" in proof:
        return "the next claim or reap after its last process has ended", "gpulock reap"
    show = "scontrol show job" if record.scheduler == "slurm" else "qstat -j"
    return "its epilog, when the job ends", f"{show} {record.job_id}"


def restore_command(row: DeviceState) -> str:
    """Return what puts a device back into service: an instance may be out by its card."""
    assert row.device is not None
    if row.noted in ("", row.id):
        return f"gpulock restore {row.device.label()}"
    return f"gpulock restore {row.device.index if row.noted == row.device.bus else row.noted}"


def quarantine_end_condition(reason: str) -> str:
    """Return what brings a device back; the reason ends with who took it out."""
    why, _, who = reason.rpartition(" (")
    if who != f"{POLICY})":
        return ADMINISTRATOR
    from gpulock.daemon.health.recovery import describe_recovery  # its modules cost 10 ms

    return describe_recovery(why)
