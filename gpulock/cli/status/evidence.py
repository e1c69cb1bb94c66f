# SPDX-License-Identifier: Apache-2.0
"""What can be seen of an owner: processes, session, group, open devices, and `finished/`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from gpulock.alloc.job_processes import find_job_processes
from gpulock.alloc.process_owner import belongs_to_other_claim
from gpulock.alloc.states import FOREIGN, HELD_IDLE, DeviceState
from gpulock.cli.select import Subject
from gpulock.cli.session import owns_lock_dir, uid_to_user_name
from gpulock.cli.status.attention import format_foreign_processes
from gpulock.cli.status.status_view import ProcessView, StatusView
from gpulock.daemon.health.cards import read_cards
from gpulock.errors import quote_text
from gpulock.node.devices import SHARE
from gpulock.node.procfs import INIT, TICKS, Proc
from gpulock.report.claims import ReportedClaim
from gpulock.report.scan import ClaimQuery, HistoryFaults
from gpulock.report.sources import MONTH, find_last_claim
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.store.verdicts import process_in_proof
from gpulock.text.words import (
    format_count,
    format_device_label,
    format_device_list,
    format_duration,
    format_local_time,
    format_lock_holder,
    held_seconds,
)

FactList = list[tuple[str, str]]
SHOWN = 4  # processes named before `and 7 more`
LONGEST_NAME = 40  # characters of a process's name
KEPT_BY_KERNEL = 15  # bytes of it: TASK_COMM_LEN
SECONDS = 1.0  # a process that hangs may not let its command line be read
NO_NAME = re.compile(r"[^\w .+:/@-]")


def describe_lock(processes: ProcessView, lock: Lock, ids: Sequence[str]) -> FactList:
    """Return what is known of one claim; `ids` are the devices whose openers are told."""
    view, record = processes.view, lock.owner
    if record is None:
        return [("record", lock.fault or "none: a claim is being made")]
    here = record.boot_id == view.node.boot_id
    seconds = held_seconds(record, view.node.boot_id, view.boottime, view.now)
    ago = f"{format_duration(seconds)} ago{'' if here else ', before this boot'}"
    facts: FactList = [("since", f"{format_local_time(record.claimed_at)}, {ago}")]
    if SHARE in lock.id:
        card, *_ = lock.id.partition(SHARE)
        count = sum(name.partition(SHARE)[0] == card for name in record.devices)
        label = format_device_label(card, view.devices)
        facts.append(("share", f"{count} of {record.places} places of {label}"))
    if len({name.partition(SHARE)[0] for name in record.devices}) > 1:
        facts.append(("grant", f"{format_device_list(record.devices, view.devices)} in one claim"))
    if record.comment and record.scheduler == "process":
        facts.append(("made by", f"a `{record.comment}` command"))
    elif record.comment:
        facts.append(("reason", record.comment))
    if record.note:
        facts.append(("comment", quote_text(record.note)))
    if record.until and here:
        when = format_local_time(view.now + record.until - view.boottime)
        over = "; it is over" if view.boottime > record.until else ""
        facts.append(("end", f"{when}{over}"))
    if record.scheduler == "admin":
        return facts
    facts.append(("verdict", describe_verdict(view, record)))
    facts += describe_owner_processes(processes, lock, record)
    opened = [describe_open_device(processes, name, record) for name in ids]
    if opened:
        facts.append(("open", "; ".join(dict.fromkeys(opened))))  # places of a card are one device
    # of the owner alone: what was not seen of others keeps no lock of this user's
    missed = (
        processes.scan.why_blind_about(record.uid)
        or processes.holders.users_by_device(record.uid)[1]
    )
    if missed and owns_lock_dir(view.node):  # else the verdict is another's, who sees more
        facts.append(("not seen", missed))
    return facts


def describe_verdict(view: StatusView, record: Owner) -> str:
    """Return the verdict with its proof."""
    if view.verdicts is None:
        return "not judged: gpulockd does not run, and only root can see everything"
    verdict = view.verdicts.get(record.token)
    if verdict is None:
        return "not judged yet: claimed after the last reconcile"
    draining = ", released by its job already" if record.draining else ""
    ago = ""
    if not owns_lock_dir(view.node) and view.reconciled is not None:  # it is not of this moment
        ago = f", {format_duration(view.boottime - view.reconciled)} ago"
    return f"{verdict.state}: {verdict.proof}{draining}{ago}"


def describe_owner_processes(processes: ProcessView, lock: Lock, record: Owner) -> FactList:
    """Return whether the owner's processes run."""
    facts: FactList = []
    proc = processes.scan.proc
    if record.scheduler == "slurm":
        facts += describe_slurm_steps(processes, record)
    if record.pid:
        word = "shepherd" if record.scheduler == "sge" else "process"
        facts.append((word, describe_process(proc, record.pid, record.start)))
    for pid, start, _ in lock.anchors:
        facts.append(("task", describe_process(proc, pid, start)))
    for gid in lock.groups():
        carriers = format_process_list(proc, processes.scan.carriers(gid))
        nobody = f"no process{unseen_note(proc)}"
        facts.append(("group", f"{gid}, carried by {carriers or nobody}"))
    if record.scheduler == "process":  # past a claim's end this is what keeps it
        left = find_job_processes(lock, processes.scan).pids
        facts.append(("beside it", format_process_list(proc, [*left]) or "nothing to be seen"))
    elif record.sid and not record.add_grp_id:
        members = [pid for pid in processes.scan.session_members(record.sid) if pid != record.pid]
        nobody = f"no other process{unseen_note(proc)}"
        facts.append(("session", f"{record.sid}: {format_process_list(proc, members) or nobody}"))
    return facts


def describe_slurm_steps(processes: ProcessView, record: Owner) -> FactList:
    """Return the steps of a Slurm job on this node, and who is in its cgroup."""
    from gpulock.slurm.steps import SlurmSteps

    steps, proc = SlurmSteps(processes.view.node.settings), processes.scan.proc
    daemons = list(steps.daemons(processes.scan).get(record.job_id, {}))
    facts = [("steps", format_process_list(proc, daemons) or "none to be seen")]
    members = [pid for pid in steps.members(record, processes.scan) if pid not in daemons]
    return [*facts, *([("cgroup", format_process_list(proc, members))] if members else [])]


def describe_process(proc: Proc, pid: int, start: int) -> str:
    """Return whether that very process runs."""
    try:
        if proc.running(pid, start):
            return f"{pid} ({printable_process_name(proc, pid)}) runs"
    except (OSError, ValueError) as fault:
        return f"{pid} cannot be seen: {fault}"
    return f"{pid} {absence_words(proc)}"


def unseen_note(proc: Proc) -> str:
    """Return that other users' processes are hidden from the caller, or nothing.

    Under hidepid=2 (proc(5)) not even their numbers show; init's always does otherwise.
    """
    hidden = not os.path.lexists(f"{proc.root}/{INIT}") and os.geteuid() != 0
    return " (other users' processes are hidden from you)" if hidden else ""


def absence_words(proc: Proc) -> str:
    """Return what is true of a process that does not show."""
    note = unseen_note(proc)
    return f"is not to be seen{note}" if note else "is gone"


def describe_stranger(processes: ProcessView, pid: int, record: Owner) -> str:
    """Return whose a process is that a claim may not be blamed for, or that it is older."""
    try:
        for lock in processes.view.held.values():
            if lock.owner and belongs_to_other_claim(pid, lock, record, processes.scan):
                return format_lock_holder(lock.owner)
        uid = processes.scan.account(pid, processes.scan.status(pid).uids[0])
        began = (processes.scan.proc.start(pid) + 1) / TICKS  # at the latest
    except (OSError, ValueError):
        return ""
    if uid != record.uid:
        return f"of {uid_to_user_name(uid)}"
    here = record.boot_id == processes.view.node.boot_id and pid != record.pid
    return "older than the claim" if here and began < record.claimed_boottime else ""


def describe_open_device(processes: ProcessView, device: str, record: Owner | None = None) -> str:
    """Return who has a device open, as far as the caller can see, and who is not of `record`."""
    pids = processes.holders.pids_with_open(device)
    if record is not None:  # of the owner's files each was asked for its device, whatever its path
        pids = [*dict.fromkeys([*pids, *processes.holders.pids_with_open(device, record.uid)])]
    whose = [describe_stranger(processes, pid, record) if record else "" for pid in pids[:SHOWN]]
    who = format_process_list(processes.scan.proc, pids, whose) or "nobody"
    missed = processes.holders.users_by_device(None)[1]
    limit = f" ({missed})" if missed else ""
    if os.geteuid() != 0:
        limit = " (of your own processes; root sees all)"
    return f"{format_device_list([device], processes.view.devices)}: {who}{limit}"


def describe_unclaimed_use(processes: ProcessView, pid: int) -> str:
    """Return what a process of no claim has open, and who holds that."""
    opened: list[str] = []
    for row in processes.view.rows():
        if row.device and pid in processes.holders.pids_with_open(row.id):
            record = row.lock.owner if row.lock else None
            holder = f": it is held by {format_lock_holder(record)}" if record else ""
            opened.append(f"GPU {row.device.label()} without a claim{holder}")
    return "; ".join(opened)


def describe_observed_use(view: StatusView, row: DeviceState) -> FactList:
    """Return what the exporter and the checks saw of a device that its state does not tell."""
    facts: FactList = []
    if who := format_foreign_processes(view, row):
        facts.append(("foreign", f"{who}, as gpulock-exporter saw it"))
    node = view.node
    if state := read_cards(node.settings.state_dir, node.boot_id).states.get(row.id):
        facts += [("check", why) for why in state.failed().values()]
        if state.tested is not None and state.has_passed(0.0):
            ago = format_duration(view.boottime - state.tested)
            facts.append(("check", f"passed HEALTH_COMMAND, begun {ago} ago"))
    idle = view.use.idle(row.id, row.lock) if row.state == HELD_IDLE else None
    if idle is not None:
        did = f"did nothing for {format_duration(idle)}, as gpulock-exporter saw it"
        facts.append(("idle", did))
    return facts


def find_blocking_pids(processes: ProcessView, row: DeviceState) -> list[int]:
    """Return the processes that keep a device: of no claim, or left by its dead owner."""
    if row.lock and row.orphans:
        there = processes.holders.pids_with_open(
            row.id, row.lock.owner.uid if row.lock.owner else None
        )
        pid = process_in_proof(row.orphans)
        return [pid] if pid in there or not there else there
    if row.state != FOREIGN:
        return []
    seen = processes.view.use.seen(row.id)
    return processes.find_foreign_pids(row.id) or list(seen.foreign_pids if seen else ())


def format_process_list(proc: Proc, pids: Sequence[int], whose: Sequence[str] = ()) -> str:
    """Return processes with their names, and whose each is where that is said; of many a few."""
    words: list[str] = []
    for number, pid in enumerate(pids[:SHOWN]):
        owner = f", {whose[number]}" if number < len(whose) and whose[number] else ""
        words.append(f"{pid} ({printable_process_name(proc, pid)}{owner})")
    more = len(pids) - SHOWN
    return ", ".join(words) + (f" and {format_count(more, 'more process')}" if more > 0 else "")


def printable_process_name(proc: Proc, pid: int) -> str:
    """Return a process's whole name, `?` where it is gone or hidden.

    The kernel keeps 15 characters, and the command line may have the rest. A user chooses both:
    what could end the brackets around it, or say more, is shown as `?`.
    """
    try:
        name = proc.status(pid).name
        if len(name) == KEPT_BY_KERNEL:
            line = proc.read_memory(pid, "cmdline", SECONDS).partition(b"\0")[0]
            whole = os.path.basename(line.decode("utf-8", "replace"))
            name = whole if whole.startswith(name) else name
    except (OSError, ValueError):
        return "?"
    return NO_NAME.sub("?", name[:LONGEST_NAME]) or "?"


def last_holder_facts(view: StatusView, device: str) -> FactList:
    """Return who had a free device last."""
    query = ClaimQuery(since=view.now - MONTH, device=device)
    claim = find_last_claim(view.node, query, HistoryFaults())
    return [("last", format_past_claim(claim))] if claim else []


def past_claim_facts(view: StatusView, meant: Subject) -> FactList:
    """Return the last thing that a job or process held, or what cannot be read of that."""
    faults = HistoryFaults()
    last = find_last_claim(view.node, meant.query(), faults)
    if last is None:
        return [("not read", one) for one in faults.as_sentences()]
    devices = format_device_list([card.id for card in last.cards], view.devices)
    return [
        ("held", f"{devices} from {format_local_time(last.begun)}"),
        ("released", format_past_claim(last)),
        ("next", f"gpulock report {last.owner.job()}"),
    ]


def format_past_claim(claim: ReportedClaim) -> str:
    """Return whose a claim was, until when, and how it was released."""
    how = ": ".join(word for word in (claim.how, claim.proof) if word)
    until = format_local_time(claim.ended or 0.0)
    return f"{format_lock_holder(claim.owner)} until {until}: {how}"
