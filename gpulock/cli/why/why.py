# SPDX-License-Identifier: Apache-2.0
"""`gpulock why`: who holds it, the evidence, what would free it, the next command."""

from __future__ import annotations

import os
import time

import click

from gpulock.alloc.process_owner import is_claim_process
from gpulock.alloc.states import FREE, MISSING, QUARANTINED, DeviceState
from gpulock.cli.select import (
    DEVICE,
    JOB,
    SelectError,
    Subject,
    match_devices,
    parse_lock_id,
    parse_subject,
)
from gpulock.cli.session import (
    CommandRefusedError,
    Session,
    name_config,
    name_config_in_facts,
    owns_lock_dir,
)
from gpulock.cli.status.attention import REQUEST, list_next_steps, list_queue_facts
from gpulock.cli.status.status_view import (
    ProcessView,
    StatusView,
    group_row_claims,
)
from gpulock.cli.why.evidence import (
    FactList,
    absence_words,
    describe_lock,
    describe_observed_use,
    describe_open_device,
    find_blocking_pids,
    last_holder_facts,
    past_claim_facts,
)
from gpulock.daemon.serve_policy import scheduler_from_settings
from gpulock.deadline import clock_boottime
from gpulock.errors import lost_records_refusal
from gpulock.node.context import Node
from gpulock.store.locks import Lock
from gpulock.text import table
from gpulock.text.words import (
    format_device_list,
    format_local_time,
    format_lock_holder,
    short_model,
)

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
    found, known = explain_subject(node, " ".join(what), table.terminal_width())
    click.echo("\n".join(found))
    if not known:
        ctx.exit(1)


def explain_subject(node: Node, text: str, width: int) -> tuple[list[str], bool]:
    """Return the answer, and whether there was anything to find; raise Refused."""
    view = StatusView(node)
    sight = ProcessView(view)
    if owns_lock_dir(node):
        sight.judge()
    rows = view.rows()
    if missing := find_missing_card(view, rows, text):
        return explain_device(view, sight, missing, width), True
    try:
        meant = parse_subject(text, view.devices)
    except SelectError as fault:
        raise CommandRefusedError(str(fault), "see gpulock status") from fault
    if meant.device is not None:
        row = next(row for row in rows if row.id == meant.device.id)
        return [*explain_device(view, sight, row, width), *same_number_job_hint(view, text)], True
    held = [
        lock for lock in view.held.values() if lock.owner and is_lock_of_subject(sight, meant, lock)
    ]
    if held:
        found, known = explain_job_claims(view, sight, rows, held, width), True
    else:
        found, known = explain_no_claim(view, sight, meant, width)
    if text.strip().isdigit():  # a number names a device first
        found.append(f"(no GPU {meant.job} is here: {meant.job} is taken for a job)")
    return found, known


def find_missing_card(view: StatusView, rows: list[DeviceState], text: str) -> DeviceState | None:
    """Return the row of the card that `text` names, None for one that is here or never was."""
    prefixed = DEVICE.fullmatch(text.strip())
    name = (prefixed[1] if prefixed else text.strip()).lower()
    place = parse_lock_id(name)
    if place is None or match_devices(name, view.devices):
        return None
    bus, dot, instance = place
    name = f"{bus}{dot}{instance}"
    absent = [row for row in rows if row.device is None]
    for row in absent:
        if row.id == name:
            return row
    reasons = ["the driver does not show it"]
    if view.use.sample and bus in view.use.sample.lost:
        reasons.append(view.use.sample.lost[bus][1])
    if note := (view.quarantined or {}).get(name):
        reasons.append(f"quarantined: {note}")
    known = any(row.lock is None for row in absent) or len(reasons) > 1
    if known or last_holder_facts(view, name):
        return DeviceState(name, None, None, MISSING, "; ".join(reasons))
    return None


def is_lock_of_subject(sight: ProcessView, meant: Subject, lock: Lock) -> bool:
    """Return whether a lock is of that job; a process also by group, session or descent."""
    record = lock.owner
    if record is None:
        return False
    if meant.owns(record) or not meant.pid:
        return meant.owns(record)
    try:
        return is_claim_process(meant.pid, lock, sight.scan)
    except (OSError, ValueError):
        return False


def explain_device(view: StatusView, sight: ProcessView, row: DeviceState, width: int) -> list[str]:
    """Explain one device."""
    word = table.state_cell(row.state)
    record = row.lock.owner if row.lock else None
    known = (view.verdicts or {}).get(record.token) if record else None
    said = known is not None and known.proof == row.reason
    found: FactList = [("reason", row.reason)] if row.reason and not said else []
    ids = [row.id] if row.device else []
    claims = [locks[0] for locks in group_row_claims(row)]
    each = len(claims) > 1 and row.state not in (QUARANTINED, MISSING)
    for lock in claims:
        if lock.owner:
            found.append(("holder", format_holder_and_queue(lock)))
        found += describe_lock(view, sight, lock, ids)
        if each:
            found += next_step_facts(view, sight, view.row_of_lock(row, lock))
            found.append(NEXT_HOLDER)
    if row.lock is None and row.device is not None:
        found.append(("open", describe_open_device(view, sight, row.id)))
    found += describe_observed_use(view, row)
    if row.lock is None:
        found += last_holder_facts(view, row.id)
    if not each:
        found += next_step_facts(view, sight, row)
    elif found[-1] == NEXT_HOLDER:
        found.pop()
    name = f"GPU {row.device.label()}" if row.device else row.id
    place = f"  {row.device.bus}  {short_model(row.device.model)}" if row.device else ""
    head = f"{click.style(name, bold=True)}{place}  {table.paint_text(word.text, word.colour)}"
    return format_answer(head, found, width)


def format_answer(head: str, facts: FactList, width: int) -> list[str]:
    """Return the lines of an answer: what it is of, and below it what is known."""
    return [head, *table.render_facts(name_config_in_facts(facts), width)]


def explain_job_claims(
    view: StatusView, sight: ProcessView, rows: list[DeviceState], held: list[Lock], width: int
) -> list[str]:
    """Explain each claim of a job: an array job has several."""
    result: list[str] = []
    for token in dict.fromkeys(lock.owner.token for lock in held if lock.owner):
        locks = [lock for lock in held if lock.owner and lock.owner.token == token]
        ids = [lock.id for lock in locks]
        row = next(row for row in rows if any(lock in locks for lock in row.locks()))
        row = view.row_of_lock(row, locks[0])
        holder = click.style(format_holder_and_queue(locks[0]), bold=True)
        head = f"{holder} holds {format_device_list(ids, view.devices)}"
        found = describe_lock(view, sight, locks[0], ids)
        found = [(label, text) for label, text in found if label != "grant"]
        result += format_answer(head, [*found, *next_step_facts(view, sight, row)], width)
    return result


def format_holder_and_queue(lock: Lock) -> str:
    """Return the holder with the queue."""
    record = lock.owner
    assert record is not None
    return format_lock_holder(record) + (f" in {record.queue}" if record.queue else "")


def next_step_facts(view: StatusView, sight: ProcessView, row: DeviceState) -> FactList:
    """Return what would free it, and the next command."""
    if row.state != FREE:
        return list_next_steps(view, row, find_blocking_pids(view, sight, row))
    if view.lost:
        lost = lost_records_refusal(view.node.store.root)
        return [("granted", f"to nobody: {lost.why}"), ("next", lost.do)]
    settings, ask = view.node.settings, REQUEST  # a user gets a GPU of a scheduler's node by a job
    if settings.sge_root:
        ask = f"qsub -l {(*settings.sge_complexes, 'gpu')[0]}=1 JOB_SCRIPT"
    elif scheduler_from_settings(view.node):
        ask = "sbatch --gres=gpu:1 JOB_SCRIPT"
    return [*list_queue_facts(view.node), ("next", ask)]


def explain_no_claim(
    view: StatusView, sight: ProcessView, meant: Subject, width: int
) -> tuple[list[str], bool]:
    """Say what is known of a job that holds nothing: how it was released, or that it runs."""
    head = f"{click.style(meant.name(), bold=True)} holds nothing on {view.node.name}"
    refused = [*sge_refusal_facts(view, meant), *slurm_refusal_facts(view, meant)]
    if found := [*refused, *past_claim_facts(view, meant)]:
        return format_answer(head, found, width), True
    found = [("released", "no trace of it among past claims; it may run here without GPUs")]
    if meant.pid:
        gone = meant.pid not in sight.scan.statuses()
        word = absence_words(sight.scan.proc) if gone else "runs"
        found = [("process", f"{meant.pid} {word}"), ("released", "no trace of a claim of it")]
    if not view.node.store.exists():
        found.append(("node", "nothing was claimed here in this boot"))
    return format_answer(head, found, width), False


def sge_refusal_facts(view: StatusView, meant: Subject) -> FactList:
    """Return why Grid Engine's prolog refused a job, the last time that it did so here."""
    from gpulock.store.event_log import list_refusals, read_events

    try:
        told = list_refusals(read_events(view.node.store.path)) if meant.job else []
    except OSError:
        told = []
    mine = [(at, text) for at, job, text in told if job == meant.job]
    begun = time.time() - clock_boottime()
    return [("refused", f"{text}, at {format_local_time(begun + at)}") for at, text in mine[-1:]]


def slurm_refusal_facts(view: StatusView, meant: Subject) -> FactList:
    """Return why a Slurm job was refused, as long as its Epilog has not run."""
    from gpulock.slurm import note

    folder = f"{view.node.store.root}/{note.FOLDER}"
    names = os.listdir(folder) if meant.job and os.path.isdir(folder) else []
    found: FactList = []
    for name in names:
        slurmd, _, job = name.rpartition(".")
        own = note.find_task_note(view.node.store.root, slurmd, job) if job == meant.job else None
        if own is not None and own.refused:
            found.append(("refused", own.refused))
    return found


def same_number_job_hint(view: StatusView, text: str) -> list[str]:
    """Point to the job that has the number of a device."""
    found = JOB.fullmatch(text)
    if found is None or found[2]:
        return []
    job = Subject(job=found[1])
    if any(lock.owner and job.owns(lock.owner) for lock in view.held.values()):
        hint = f"There is a job {found[1]} as well: gpulock why job {found[1]}"
        return [name_config(hint)]
    return []
