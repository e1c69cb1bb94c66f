# SPDX-License-Identifier: Apache-2.0
"""`gpulock why`: who holds it, the evidence, what would free it, the next command."""

from __future__ import annotations

import os

import click

from gpulock.alloc.states import QUARANTINED, Row
from gpulock.cli.select import JOB, SelectError, Subject, same_place, subject
from gpulock.cli.session import Refused, Session, owns
from gpulock.cli.status.node_view import Sight, View, judge_in_place, look, stray
from gpulock.cli.why.evidence import Facts, intruders, observed, of_lock, opened
from gpulock.cli.why.released import Past, of_subject, past
from gpulock.node.context import Node
from gpulock.store.locks import Lock
from gpulock.text import table
from gpulock.text.advice import advice
from gpulock.text.words import device_name, holder, listing, moment, short_model


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="JOB|DEVICE")
@click.pass_context
def why(ctx: click.Context, what: tuple[str, ...]) -> None:
    """Explain JOB (12, 12.3, pid 4711) or DEVICE (index, bus id, UUID).

    A number that is an index means the device; `job 3` means the job.
    """
    session: Session = ctx.obj
    node = session.node()
    found, known = explain(node, " ".join(what), table.terminal_width())
    click.echo("\n".join(found))
    if not known:
        ctx.exit(1)


def explain(node: Node, text: str, width: int) -> tuple[list[str], bool]:
    """Return the answer, and whether there was anything to find; raise Refused."""
    judging = owns(node)
    view = look(node, judging=False)
    sight = judge_in_place(view) if judging else Sight(view)
    rows = view.rows()
    gone = [row for row in rows if row.device is None and row.id == text.lower()]
    if gone and same_place(text):
        return of_row(view, sight, gone[0], width), True
    try:
        meant = subject(text, view.devices)
    except SelectError as fault:
        raise Refused(str(fault), "see gpulock status") from fault
    if meant.device is not None:
        row = next(row for row in rows if row.id == meant.device.id)
        return [*of_row(view, sight, row, width), *also_a_job(view, text)], True
    held = [lock for lock in view.held.values() if lock.owner and belongs(sight, meant, lock)]
    if held:
        return of_job(view, sight, rows, held, width), True
    return of_nothing(view, sight, meant, width)


def belongs(sight: Sight, meant: Subject, lock: Lock) -> bool:
    """Return whether a lock is of that job; a process also belongs by group and session."""
    record = lock.owner
    if record is None:
        return False
    if meant.owns(record) or not meant.pid:
        return meant.owns(record)
    status = sight.scan.statuses().get(meant.pid)
    if status is None:
        return False
    if meant.pid in [pid for pid, _ in lock.shepherds()] or status.groups & set(lock.groups()):
        return True
    try:
        return record.sid > 0 and sight.scan.proc.stat(meant.pid).session == record.sid
    except (OSError, ValueError):
        return False


def of_row(view: View, sight: Sight, row: Row, width: int) -> list[str]:
    """Explain one device."""
    word = table.state_cell(row.state)
    record = row.lock.owner if row.lock else None
    known = (view.verdicts or {}).get(record.token) if record else None
    said = known is not None and known.proof == row.reason
    found: Facts = [("reason", row.reason)] if row.reason and not said else []
    ids = [row.id] if row.device else []
    if row.lock is not None:
        if row.lock.owner:
            found.append(("holder", whole_holder(row.lock)))
        found += of_lock(view, sight, row.lock, ids)
    elif row.device is not None:
        found.append(("open", opened(view, sight, row.id)))
    found += observed(view, row)
    if row.lock is None and row.device is not None:
        found += last(view, row.id)
    found += next_facts(view, sight, row)
    name = f"GPU {device_name(row.device)}" if row.device else row.id
    place = f"  {row.device.bus}  {short_model(row.device.model)}" if row.device else ""
    head = f"{table.bold(name)}{place}  {table.paint(word.text, word.colour)}"
    return [head, *table.facts(found, width)]


def of_job(view: View, sight: Sight, rows: list[Row], held: list[Lock], width: int) -> list[str]:
    """Explain each claim of a job: an array job has several."""
    result: list[str] = []
    for token in dict.fromkeys(lock.owner.token for lock in held if lock.owner):
        locks = [lock for lock in held if lock.owner and lock.owner.token == token]
        ids = [lock.id for lock in locks]
        row = next(row for row in rows if row.lock in locks)
        head = f"{table.bold(whole_holder(locks[0]))} holds {listing(ids, view.devices)}"
        found = of_lock(view, sight, locks[0], ids)
        found = [(label, text) for label, text in found if label != "grant"]
        result += [head, *table.facts([*found, *next_facts(view, sight, row)], width)]
    return result


def whole_holder(lock: Lock) -> str:
    """Return the holder with the queue."""
    record = lock.owner
    assert record is not None
    return holder(record) + (f" in {record.queue}" if record.queue else "")


def next_facts(view: View, sight: Sight, row: Row) -> Facts:
    """Return what would free it, and the next command."""
    pids = intruders(view, sight, row)
    record = row.lock.owner if row.lock else None
    known = (view.verdicts or {}).get(record.token) if record else None
    proof = known.proof if known else ""
    freed, command = advice(row, proof, stray(view.node, row.lock), pids)
    if row.state == QUARANTINED and not (row.lock and row.lock.orphans):
        return [("back by", freed), ("next", command)]
    return [("freed by", freed), ("next", command)] if row.lock else [("next", command)]


def last(view: View, device: str) -> Facts:
    """Return who had a free device last."""
    before = [one for one in past(view.node.store.released_dir) if one.device == device][:1]
    if before:
        return [("last", ended(before[0]))]
    from gpulock.report.scan import Query, latest
    from gpulock.report.sources import history_of

    found = latest(history_of(view.node), Query(device=device))
    if found is None:
        return []
    until = moment(found.ended or 0.0)
    return [("last", f"{found.job} of {found.user} until {until}: {found.how}")]


def ended(one: Past) -> str:
    """Return whose a lock was, until when, and how it was released."""
    when = f" until {moment(one.at)}" if one.at else ""
    return f"{holder(one.owner)}{when}{': ' if one.how else ''}{one.how}"


def of_nothing(view: View, sight: Sight, meant: Subject, width: int) -> tuple[list[str], bool]:
    """Say what is known of a job that holds nothing: how it was released, or that it runs."""
    head = f"{table.bold(meant.name())} holds nothing on {view.node.name}"
    every = past(view.node.store.released_dir)
    before = of_subject(every, meant)
    if before:
        found: Facts = []
        for token in dict.fromkeys(one.owner.token for one in before):
            locks = [one for one in before if one.owner.token == token]
            devices = listing([one.device for one in locks], view.devices)
            found.append(("held", f"{devices} from {moment(locks[0].owner.claimed_at)}"))
            found.append(("released", ended(locks[0])))
        return [head, *table.facts(found, width)], True
    earlier = in_history(view, meant)
    if earlier:
        return [head, *table.facts(earlier, width)], True
    found = [*refused(view, meant), *runs_here(sight, meant)]
    oldest = f" since {moment(every[-1].at)}" if every else ""
    found.append(("released", f"no trace of it among {len(every)} released locks{oldest}"))
    if not view.node.store.exists():
        found.append(("node", "nothing was claimed here in this boot"))
    return [head, *table.facts(found, width)], False


def in_history(view: View, meant: Subject) -> Facts:
    """Return what the history has of a job or process: the last thing that it held."""
    from dataclasses import replace

    from gpulock.report.scan import Faults, Query, claims
    from gpulock.report.sources import history_of

    query = Query(job=str(meant.pid), scheduler="process") if meant.pid else Query(job=meant.job)
    found = list(claims(history_of(view.node), replace(query, task=meant.task), Faults()))
    if not found:
        return []
    last = found[-1]
    how = f"{last.how}{': ' if last.proof else ''}{last.proof}"
    devices = listing([card.id for card in last.cards], view.devices)
    return [
        ("held", f"{devices} from {moment(last.begun)}"),
        ("released", f"{last.job} of {last.user} until {moment(last.ended or 0.0)}: {how}"),
        ("next", f"gpulock report {last.job}"),
    ]


def refused(view: View, meant: Subject) -> Facts:
    """Return why a Slurm job was refused, as long as its Epilog has not run."""
    from gpulock.slurm import note

    folder = f"{view.node.store.path}/{note.FOLDER}"
    names = os.listdir(folder) if meant.job and os.path.isdir(folder) else []
    found: Facts = []
    for name in names:
        slurmd, _, job = name.rpartition(".")
        own = note.find(view.node.store.path, slurmd, job) if job == meant.job else None
        if own is not None and own.refused:
            found.append(("refused", own.refused))
    return found


def runs_here(sight: Sight, meant: Subject) -> Facts:
    """Return whether the process runs, or a shepherd of the job as far as we may see."""
    if meant.pid:
        there = meant.pid in sight.scan.statuses()
        return [("process", f"{meant.pid} {'runs' if there else 'is gone'}")]
    from gpulock.sge import spool
    from gpulock.sge.verdict import shepherds
    from gpulock.slurm.steps import Steps
    from gpulock.store import atomic

    daemons = Steps(sight.view.node.settings).daemons(sight.scan)
    for pid in daemons.get(meant.job, {}):
        return [("step", f"{pid} runs it here, without GPUs")]
    hidden = False
    # not a stranger's of that name, in a directory of his
    for pid in dict.fromkeys([*shepherds(sight.scan), *shepherds(sight.scan, os.geteuid())]):
        try:
            path = f"{sight.scan.proc.root}/{pid}/cwd/config"
            config = spool.parse_config(atomic.read_text(path, spool.CONFIG_LIMIT))
        except OSError:
            hidden = True
            continue
        task = config.get("ja_task_id", ["0"])[0].lstrip("0") or "1"
        if config.get("job_id") == [meant.job] and meant.task in ("", task):
            return [("shepherd", f"{pid} runs it here, without GPUs")]
    text = "some shepherds are hidden from you" if hidden else "no shepherd of it runs here"
    return [("shepherd", text)]


def also_a_job(view: View, text: str) -> list[str]:
    """Point to the job that has the number of a device."""
    found = JOB.fullmatch(text)
    if found is None or found[2]:
        return []
    job = Subject(job=found[1])
    if any(lock.owner and job.owns(lock.owner) for lock in view.held.values()):
        return [f"There is a job {found[1]} as well: gpulock why job {found[1]}"]
    return []
