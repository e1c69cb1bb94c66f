# SPDX-License-Identifier: Apache-2.0
"""What can be seen of an owner: processes, session, group, open devices, and what follows."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpulock.alloc.liveness import session
from gpulock.alloc.states import FOREIGN, HELD_IDLE, Row
from gpulock.cli.status.attention import strangers
from gpulock.cli.status.node_view import Sight, View
from gpulock.node.procfs import Proc
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.text.advice import ALIVE
from gpulock.text.words import counted, duration, held_seconds, listing, moment

Facts = list[tuple[str, str]]
SHOWN = 4  # processes named before `and 7 more`


def of_lock(view: View, sight: Sight, lock: Lock, ids: Sequence[str]) -> Facts:
    """Return what is known of one claim; `ids` are the devices whose openers are told."""
    record = lock.owner
    if record is None:
        return [("record", lock.fault or "none: a claim cut short, or one at work this moment")]
    found: Facts = [("since", since(view, record))]
    if len(record.devices) > 1:
        found.append(("grant", f"{listing(record.devices, view.devices)} in one claim"))
    if record.comment:
        found.append(("because", record.comment))
    if record.scheduler == "admin":
        return found
    found.append(("verdict", verdict(view, record)))
    found += of_processes(sight, lock, record)
    found.append(("open", "; ".join(opened(view, sight, name) for name in ids)))
    if sight.scan.blind or sight.holders.blind:
        found.append(("not seen", sight.scan.blind or sight.holders.blind))
    return found


def since(view: View, record: Owner) -> str:
    """Return when the claim was made, and how long ago."""
    seconds = held_seconds(record, view.node.boot_id, view.boottime, view.now)
    earlier = "" if record.boot_id == view.node.boot_id else ", before this boot"
    return f"{moment(record.claimed_at)}, {duration(seconds)} ago{earlier}"


def verdict(view: View, record: Owner) -> str:
    """Return the verdict with its proof."""
    if view.verdicts is None:
        return "not judged: gpulockd does not run, and only root can see everything"
    found = view.verdicts.get(record.token)
    if found is None:
        return "not judged yet: claimed after the last reconcile"
    settling = ", released by its job already" if record.settling else ""
    return f"{found.state}: {found.proof}{settling}"


def of_processes(sight: Sight, lock: Lock, record: Owner) -> Facts:
    """Return whether the owner's processes run."""
    found: Facts = []
    proc = sight.scan.proc
    if record.scheduler == "slurm":
        found += of_steps(sight, record)
    if record.pid:
        word = "shepherd" if record.scheduler == "sge" else "process"
        found.append((word, running(proc, record.pid, record.start)))
    for pid, start, _ in lock.anchors:
        found.append(("task", running(proc, pid, start)))
    for gid in lock.groups():
        carriers = named(proc, sight.scan.carriers(gid))
        found.append(("group", f"{gid}, carried by {carriers or 'nobody'}"))
    if record.sid and not record.add_grp_id:
        members = [pid for pid in session(sight.scan, record.sid) if pid != record.pid]
        found.append(("session", f"{record.sid}: {named(proc, members) or 'nobody else'}"))
    return found


def of_steps(sight: Sight, record: Owner) -> Facts:
    """Return the steps of a Slurm job on this node, and who is in its cgroup."""
    from gpulock.slurm.steps import Steps

    steps = Steps(sight.view.node.settings)
    daemons = list(steps.daemons(sight.scan).get(record.job_id, {}))
    found: Facts = [("steps", named(sight.scan.proc, daemons) or "none to be seen")]
    members = [pid for pid in steps.members(record, sight.scan) if pid not in daemons]
    return [*found, ("cgroup", named(sight.scan.proc, members))] if members else found


def running(proc: Proc, pid: int, start: int) -> str:
    """Return whether that very process runs."""
    try:
        return (
            f"{pid} ({name_of(proc, pid)}) runs" if proc.running(pid, start) else f"{pid} is gone"
        )
    except (OSError, ValueError) as fault:
        return f"{pid} cannot be seen: {fault}"


def opened(view: View, sight: Sight, device: str) -> str:
    """Return who has a device open, as far as the caller can see."""
    who = named(sight.scan.proc, sight.holders.of(device)) or "nobody"
    limit = "" if os.geteuid() == 0 else " (of your own processes; root sees all)"
    return f"{listing([device], view.devices)}: {who}{limit}"


def observed(view: View, row: Row) -> Facts:
    """Return what the exporter saw of a device that its state does not tell."""
    found: Facts = []
    who = strangers(view, row)
    if who:
        found.append(("foreign", f"{who}, as gpulock-exporter saw it"))
    idle = view.use.idle(row.id, row.lock) if row.state == HELD_IDLE else None
    if idle is not None:
        found.append(("idle", f"did nothing for {duration(idle)}, as gpulock-exporter saw it"))
    return found


def intruders(view: View, sight: Sight, row: Row) -> list[int]:
    """Return the processes that keep a device: of no claim, or left by its dead owner."""
    if row.lock and row.lock.orphans:
        told = ALIVE.search(row.lock.orphans)
        there = sight.holders.of(row.id)
        pid = int(told[1]) if told else 0
        return [pid] if pid in there or not there else there
    if row.state != FOREIGN:
        return []
    seen = view.use.seen(row.id)
    return sight.strangers(row.id) or list(seen.foreign_pids if seen else ())


def named(proc: Proc, pids: Sequence[int]) -> str:
    """Return processes with their names, the first few of many."""
    words = [f"{pid} ({name_of(proc, pid)})" for pid in pids[:SHOWN]]
    more = len(pids) - SHOWN
    return ", ".join(words) + (f" and {counted(more, 'more process')}" if more > 0 else "")


def name_of(proc: Proc, pid: int) -> str:
    """Return a process's name, `?` where it is gone or hidden."""
    try:
        return "".join(c if c.isprintable() else "?" for c in proc.status(pid).name) or "?"
    except (OSError, ValueError):
        return "?"
