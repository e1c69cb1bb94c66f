# SPDX-License-Identifier: Apache-2.0
"""`gpulock why`: who holds it, the evidence, what would free it, the next command."""

from __future__ import annotations

import glob
import os

import click

from gpulock.alloc.process_owner import is_claim_process
from gpulock.alloc.states import FREE, MISSING, QUARANTINED, DeviceState
from gpulock.cli.select import (
    DEVICE,
    Subject,
    match_devices,
    parse_bare_pid,
    parse_lock_id,
    parse_subject,
)
from gpulock.cli.session import Session, name_config, owns_lock_dir
from gpulock.cli.status.attention import REQUEST, list_next_steps, list_queue_facts
from gpulock.cli.status.evidence import (
    FactList,
    absence_words,
    describe_lock,
    describe_observed_use,
    describe_open_device,
    describe_unclaimed_use,
    find_blocking_pids,
    last_holder_facts,
    past_claim_facts,
)
from gpulock.cli.status.status_view import ProcessView, StatusView, group_by_claim
from gpulock.daemon.serve_policy import scheduler_from_settings
from gpulock.node.context import Node
from gpulock.slurm import note
from gpulock.store.event_log import list_refusals, read_events
from gpulock.store.locks import Lock
from gpulock.text import table
from gpulock.text.words import (
    format_device_list,
    format_local_time,
    format_lock_holder,
    short_model,
)
from gpulock.workstation.waiting import read_waiting

NEXT_HOLDER = ("", "")  # an empty line


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="JOB|DEVICE")
@click.pass_context
def why_command(ctx: click.Context, what: tuple[str, ...]) -> None:
    """Explain JOB (12, 12.3, pid 4711) or DEVICE (index, bus id, UUID).

    A number that is an index means the device; `job 3` means the job.
    """
    session: Session = ctx.obj
    node = session.node()
    lines, known = explain_subject(node, " ".join(what), table.terminal_width())
    click.echo("\n".join(lines))
    if not known:
        ctx.exit(1)


def explain_subject(node: Node, text: str, width: int) -> tuple[list[str], bool]:
    """Return the answer, and whether there was anything to find; raise Refusal."""
    view = StatusView(node)
    processes = ProcessView(view)
    if owns_lock_dir(node):
        processes.judge()
    text = text.strip()
    if missing := find_missing_card(view, text):
        return explain_device(processes, missing, width), True
    meant = parse_subject(text, view.devices)
    if meant.device is not None:
        row = next(row for row in view.rows() if row.id == meant.device.id)
        lines, known = explain_device(processes, row, width), True
        if any(lock.owner and Subject(job=text).owns(lock.owner) for lock in view.held.values()):
            lines.append(name_config(f"There is a job {text} as well: gpulock why job {text}"))
        return lines, known
    lines, known = explain_claims(processes, meant, width)
    word = "job"
    if not known and (process := parse_bare_pid(text.removeprefix("job"))).pid:
        other, known = explain_claims(processes, process, width)
        lines, word = (other, "process") if known else (lines, word)
    if text.isdigit():  # a number names a device first
        lines.append(f"(no GPU {meant.job} is here: {meant.job} is taken for a {word})")
    return lines, known


def find_missing_card(view: StatusView, text: str) -> DeviceState | None:
    """Return the row of the card that `text` names, None for one that is here or never was."""
    prefixed = DEVICE.fullmatch(text)
    name = (prefixed[1] if prefixed else text).lower()
    place = parse_lock_id(name)
    if place is None or match_devices(name, view.devices):
        return None
    name = "".join(place[:2])
    absent = {row.id: row for row in view.rows() if row.device is None}
    reasons = [absent[name].reason if name in absent else "the driver does not show it"]
    if view.use.sample and place[0] in view.use.sample.lost:
        reasons.append(view.use.sample.lost[place[0]][1])
    if note := (view.quarantined or {}).get(name):
        reasons.append(f"quarantined: {note}")
    if name in absent:
        absent[name].reason = "; ".join(filter(None, reasons))
        return absent[name]
    expected = any(row.lock is None for row in absent.values())
    if expected or len(reasons) > 1 or last_holder_facts(view, name):
        return DeviceState(name, None, None, MISSING, "; ".join(reasons))
    return None


def is_lock_of_subject(processes: ProcessView, meant: Subject, lock: Lock) -> bool:
    """Return whether a lock is of that job; a process also by group, session or descent."""
    if lock.owner is None or meant.owns(lock.owner) or not meant.pid:
        return lock.owner is not None and meant.owns(lock.owner)
    try:
        return is_claim_process(meant.pid, lock, processes.scan)
    except (OSError, ValueError):
        return False


def explain_device(processes: ProcessView, row: DeviceState, width: int) -> list[str]:
    """Explain one device."""
    view, device = processes.view, row.device
    record = row.lock.owner if row.lock else None
    known = (view.verdicts or {}).get(record.token) if record else None
    said = known is not None and known.proof == row.reason
    facts: FactList = [("reason", row.reason)] if row.reason and not said else []
    claims = [locks[0] for locks in group_by_claim(row.locks())]
    each = len(claims) > 1 and row.state not in (QUARANTINED, MISSING)
    for lock in claims:
        if lock.owner:
            facts.append(("holder", format_holder_and_queue(lock)))
        facts += describe_lock(processes, lock, [row.id] if device else [])
        if each:
            facts += [*next_step_facts(processes, view.row_of_lock(row, lock)), NEXT_HOLDER]
    if row.lock is None and device is not None:
        facts.append(("open", describe_open_device(processes, row.id)))
    facts += describe_observed_use(view, row)
    for one in view.reservations:
        if one.device == row.id and one.describe() != row.reason:
            facts.append(("later" if one.begin > view.now else "now", one.describe()))
    if row.lock is None:
        facts += last_holder_facts(view, row.id)
    if not each:
        facts += next_step_facts(processes, row)
    elif facts[-1] == NEXT_HOLDER:
        facts.pop()
    name = f"GPU {device.label()}" if device else row.id
    place = f"  {device.bus}  {short_model(device.model)}" if device else ""
    state = table.state_cell(row.state)
    head = f"{click.style(name, bold=True)}{place}  {table.paint_text(state.text, state.colour)}"
    return format_answer(head, facts, width)


def format_answer(head: str, facts: FactList, width: int) -> list[str]:
    """Return the lines of an answer: what it is of, and below it what is known."""
    named = [(label, name_config(text)) for label, text in facts]
    return [head, *table.render_facts(named, width)]


def explain_claims(processes: ProcessView, meant: Subject, width: int) -> tuple[list[str], bool]:
    """Return the answer for a job or process, and whether anything is known of a claim of it."""
    locks = processes.view.held.values()
    if held := [lock for lock in locks if is_lock_of_subject(processes, meant, lock)]:
        return explain_job_claims(processes, held, width), True
    return explain_no_claim(processes, meant, width)


def explain_job_claims(processes: ProcessView, held: list[Lock], width: int) -> list[str]:
    """Explain each claim of a job: an array job has several."""
    view, result = processes.view, list[str]()
    for locks in group_by_claim(held):
        ids = [lock.id for lock in locks]
        row = next(row for row in view.rows() if any(lock in locks for lock in row.locks()))
        row = view.row_of_lock(row, locks[0])
        holder = click.style(format_holder_and_queue(locks[0]), bold=True)
        head = f"{holder} holds {format_device_list(ids, view.devices)}"
        facts = [fact for fact in describe_lock(processes, locks[0], ids) if fact[0] != "grant"]
        result += format_answer(head, [*facts, *next_step_facts(processes, row)], width)
    return result


def format_holder_and_queue(lock: Lock) -> str:
    """Return the holder with the queue."""
    record = lock.owner
    assert record is not None
    return format_lock_holder(record) + (f" in {record.queue}" if record.queue else "")


def next_step_facts(processes: ProcessView, row: DeviceState) -> FactList:
    """Return what would free it, and the next command."""
    view = processes.view
    if row.state != FREE:
        return list_next_steps(view, row, find_blocking_pids(processes, row))
    if view.lost:
        return [("granted", f"to nobody: {view.lost.why}"), ("next", view.lost.do)]
    settings, ask = view.node.settings, REQUEST  # a user gets a GPU of a scheduler's node by a job
    if settings.sge_root:
        ask = f"qsub -l {(*settings.sge_complexes, 'gpu')[0]}=1 JOB_SCRIPT"
    elif scheduler_from_settings(view.node):
        ask = "sbatch --gres=gpu:1 JOB_SCRIPT"
    return [*list_queue_facts(view.node), ("next", ask)]


def explain_no_claim(processes: ProcessView, meant: Subject, width: int) -> tuple[list[str], bool]:
    """Say what is known of a job that holds nothing: how it was released, or that it runs."""
    view = processes.view
    head = f"{click.style(meant.name(), bold=True)} holds nothing on {view.node.name}"
    callers = read_waiting(view.node)
    facts = [
        ("waits", f"as number {one.number} of {one.user} for {one.what}: {one.why}; gpulock queue")
        for one in callers
        if one.pid == meant.pid or str(one.number) == meant.job
    ]
    facts += [*refusal_facts(view, meant.job), *past_claim_facts(view, meant)]
    if facts:
        return format_answer(head, facts, width), True
    facts = [("released", "no trace of it among past claims; it may run here without GPUs")]
    if meant.pid:
        gone = processes.scan.has_ended(meant.pid)
        word = absence_words(processes.scan.proc) if gone else "runs"
        if opened := describe_unclaimed_use(processes, meant.pid):
            return format_answer(head, [("open", opened)], width), True
        facts = [("process", f"{meant.pid} {word}"), ("released", "no trace of a claim of it")]
    if not os.path.lexists(view.node.store.claims_dir):
        facts.append(("node", "nothing was claimed here in this boot"))
    return format_answer(head, facts, width), False


def refusal_facts(view: StatusView, job: str) -> FactList:
    """Return why a job was refused here: by Grid Engine's prolog the last time, or Slurm's now."""
    try:
        refusals = list_refusals(read_events(view.node.store.path)) if job else []
    except OSError:
        refusals = []
    begun = view.now - view.boottime
    mine = [f"{text}, at {format_local_time(begun + at)}" for at, of, text in refusals if of == job]
    facts = [("refused", text) for text in mine[-1:]]
    root = view.node.store.root
    for path in glob.glob(f"{glob.escape(root)}/{note.FOLDER}/*.{job}") if job else ():
        own = note.find_task_note(root, os.path.basename(path).rpartition(".")[0], job)
        facts += [("refused", own.refused)] if own and own.refused else []
    return facts
