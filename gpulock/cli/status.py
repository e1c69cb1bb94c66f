# SPDX-License-Identifier: Apache-2.0
"""`gpulock status`: every device, who holds it, and what needs attention."""

from __future__ import annotations

import click

from gpulock import state
from gpulock.cli import table
from gpulock.cli.look import View, look
from gpulock.cli.session import Session, owns
from gpulock.cli.table import Cell, Column
from gpulock.cli.words import counted, device_name, duration, held_seconds, short_model
from gpulock.state import Row

COLUMNS = (
    Column("GPU", right=True),
    Column("BUS ID"),
    Column("MODEL", least=10),
    Column("STATE"),
    Column("JOB", least=8),
    Column("USER", least=6),
    Column("QUEUE", least=6),
    Column("HELD FOR", right=True),
)
ATTENTION = (state.MISSING, state.QUARANTINED, state.STALE, state.NOT_KNOWN, state.FOREIGN)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/status-json.md).")
@click.option("--free", "only_free", is_flag=True, help="List free devices only; 1 if none.")
@click.pass_context
def status(ctx: click.Context, as_json: bool, only_free: bool) -> None:
    """Show every GPU, its state and who holds it."""
    session: Session = ctx.obj
    node = session.node()
    view = look(node, judging=owns(node))
    rows = view.rows()
    shown = [row for row in rows if row.state == state.FREE] if only_free else rows
    if as_json:
        from gpulock.cli.status_json import text

        click.echo(text(view, rows, shown))
    else:
        click.echo("\n".join(lines(view, rows, shown, table.terminal_width())))
    if only_free and not shown:
        ctx.exit(1)


def lines(view: View, rows: list[Row], shown: list[Row], width: int) -> list[str]:
    """Return the table of `shown`, the totals of `rows` and what needs attention."""
    result: list[str] = []
    if shown:
        result += table.render(COLUMNS, [cells(view, row) for row in shown], width)
    result.append(totals(rows))
    if len(shown) == len(rows):
        result += attention(view, rows, width)
    return result


def cells(view: View, row: Row) -> list[Cell]:
    """Return one row of the table."""
    device = row.device
    name, bus, model = "-", row.id, ""
    if device is not None:
        name, bus = device_name(device), device.bus
        model = f"{short_model(device.model)} {device.profile}".strip()
    elif row.lock is None:
        bus = ""  # a card that is only known to be missing
    job = user = queue = held = ""
    record = row.lock.owner if row.lock else None
    if record is not None:
        job, user, queue = record.job(), record.user, record.queue
        held = duration(held_seconds(record, view.node.boot_id, view.boottime, view.now))
    return [
        Cell(name),
        Cell(bus),
        Cell(model),
        table.state_cell(row.state),
        Cell(job),
        Cell(user),
        Cell(queue),
        Cell(held),
    ]


def totals(rows: list[Row]) -> str:
    """Return `8 GPUs: 3 free, 4 held, 1 quarantined`; instances make it `devices`."""
    found = state.counts(rows)
    split = any(row.device is not None and row.device.parent for row in rows)
    words = [
        table.paint(f"{found[name]} {table.state_cell(name).text}", table.COLOURS[name])
        for name in reversed(state.STATES)
        if found[name] or name == state.FREE
    ]
    return f"{counted(len(rows), 'device' if split else 'GPU')}: {', '.join(words)}"


def attention(view: View, rows: list[Row], width: int) -> list[str]:
    """Return a line for what somebody must look at, devices of one fate on one line."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.state in ATTENTION:
            token = row.lock.owner.token if row.lock and row.lock.owner else row.id
            groups.setdefault(f"{row.state} {row.reason} {token if row.lock else ''}", []).append(
                row
            )
    pairs = [(label(same), sentence(same[0])) for same in groups.values()]
    if view.lost:
        why = "nothing is granted until they are put back; run gpulock reap as root"
        pairs.insert(0, ("locks lost", why))
    return table.facts(pairs, width)


def label(rows: list[Row]) -> str:
    """Return what names rows in a line of their own."""
    names = [device_name(row.device) if row.device else row.id for row in rows]
    if rows[0].device is None:
        return rows[0].id if rows[0].lock else counted(len(rows), "GPU")
    return f"GPU{'s' if len(rows) > 1 else ''} {', '.join(names)}"


def sentence(row: Row) -> str:
    """Return state, reason and the next command."""
    return f"{row.state}: {row.reason}; {next_command(row)}"


def next_command(row: Row) -> str:
    """Return what to do about a row that needs attention."""
    name = device_name(row.device) if row.device else row.id
    if row.state == state.STALE:
        return "the next claim or gpulock reap frees it"
    if row.state == state.MISSING:
        return f"gpulock why {name}" if row.lock else "look at dmesg for the card"
    if row.state == state.QUARANTINED and not (row.lock and row.lock.orphans):
        return f"gpulock restore {name} ends it"
    return f"gpulock why {name}"
