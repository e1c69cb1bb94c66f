# SPDX-License-Identifier: Apache-2.0
"""`gpulock status`: every device, who holds it, what it does, and what needs attention."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable

import click

from gpulock.alloc import states
from gpulock.alloc.shares import card_share_room
from gpulock.alloc.states import DeviceState
from gpulock.cli.session import (
    CommandRefusedError,
    Session,
    name_config,
    owns_lock_dir,
    parse_duration_option,
)
from gpulock.cli.status import device_table
from gpulock.cli.status.attention import list_attention_facts
from gpulock.cli.status.status_view import StatusView, view_node
from gpulock.errors import Refusal
from gpulock.text import table
from gpulock.text.words import format_count, format_device_label, format_local_time

TAKEN = (states.HELD, states.HELD_IDLE, states.NOT_KNOWN)  # by any holder
NARROWEST = 20  # columns of a terminal that a table fits into
SHORTEST, LONGEST = 0.2, 3600.0  # seconds between two frames
CLEAR = "\x1b[H\x1b[2J"  # xterm (ctlseqs), which all of today's terminals know


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--free", "only_free", is_flag=True, help="List only free devices; exit 1 if none.")
@click.option(
    "--idle",
    metavar="DURATION",
    callback=parse_duration_option,
    help="List only held devices idle for that long (30m); exit 1 if none.",
)
@click.option(
    "--watch",
    "period",
    is_flag=False,
    flag_value="2",
    type=click.FloatRange(SHORTEST, LONGEST),
    metavar="[SECONDS]",
    help="Repeat every 2 seconds, or as given; Ctrl-C ends it.",
)
@click.option("--cluster", is_flag=True, help="Show all nodes, from PROMETHEUS_URL.")
@click.pass_context
def status_command(
    ctx: click.Context,
    as_json: bool,
    only_free: bool,
    idle: float,
    period: float | None,
    cluster: bool,
) -> None:
    """Show every GPU, its state, who holds it and how busy it is."""
    session: Session = ctx.obj
    for wrong, why in (
        (only_free and idle, "--free and --idle: a free device is not held"),
        (cluster and idle, "--cluster and --idle: each node lists its own idle devices"),
        (cluster and as_json, "--cluster and --json: ask Prometheus itself"),
        (as_json and period is not None, "--json and --watch: call it again for each document"),
    ):
        if wrong:
            raise click.UsageError(why)
    if as_json:
        from gpulock.cli.status.as_json import format_status_json

        view, shown = look_at_node(session, only_free, idle)
        click.echo(format_status_json(view, view.rows(), shown))
        ctx.exit(int(not shown and bool(only_free or idle)))

    def draw() -> tuple[list[str], bool]:
        width = table.terminal_width(NARROWEST)
        if cluster:
            from gpulock.cli.status.cluster import format_cluster_tables, observe_cluster

            nodes = observe_cluster(session.settings().prometheus_url)
            return format_cluster_tables(nodes, only_free, width)
        view, shown = look_at_node(session, only_free, idle)
        return format_status_lines(view, shown, width, idle), not shown

    if period is not None:
        watch_status(draw, period)
        return
    lines, empty = draw()
    click.echo("\n".join(lines))
    ctx.exit(int(empty and bool(only_free or idle)))


def look_at_node(
    session: Session, only_free: bool, idle: float
) -> tuple[StatusView, list[DeviceState]]:
    """Return this node, and what of it was asked for; raise Refusal."""
    node = session.node()
    view = view_node(node, judging=owns_lock_dir(node))
    return view, select_status_rows(view, view.rows(), only_free, idle)


def watch_status(draw: Callable[[], tuple[list[str], bool]], period: float) -> None:
    """Draw every `period` seconds until Ctrl-C, on a terminal one frame over the other.

    What is broken now may be well in the next frame. Raises BrokenPipeError once nobody reads.
    """
    try:
        while True:
            width = table.terminal_width(NARROWEST)
            now = f"{os.uname().nodename}  {format_local_time(time.time())}"
            frame = [*textwrap.wrap(f"{now}  every {period:g} s, Ctrl-C ends it", width), ""]
            try:
                frame += draw()[0]
            except Refusal as refusal:
                frame += textwrap.wrap(name_config(refusal.sentence("status")), width)
            except OSError as fault:
                frame += textwrap.wrap(f"gpulock: status: {fault}", width)
            if sys.stdout.isatty():
                height = os.get_terminal_size(sys.stdout.fileno()).lines
                left = len(frame) - height + 2
                if left > 1 and height > 1:
                    frame[-left:] = [f"  {left} more lines: a taller window"]
                click.echo(CLEAR, nl=False, color=True)
            else:
                frame.append("")
            click.echo("\n".join(frame))
            time.sleep(period)
    except KeyboardInterrupt:
        return


def select_status_rows(
    view: StatusView, rows: list[DeviceState], only_free: bool, idle: float
) -> list[DeviceState]:
    """Return the rows that were asked for; raise Refusal where nobody knows what is idle."""
    if only_free:
        return [row for row in rows if row.state == states.FREE]
    if not idle:
        return rows
    if view.use.sample is None:
        why = (
            view.use.why
            or f"no gpulock-exporter runs: there is no {view.node.settings.exporter_dir}"
        )
        raise CommandRefusedError(f"what is idle is not known: {why}", "look at gpulock-exporter")
    ids = view.use.idle_ids(view.held, idle)
    taken = [row for row in rows if row.state in TAKEN]
    return [row for row in taken if row.id in ids or any(one.id in ids for one in row.locks())]


def format_status_lines(
    view: StatusView, shown: list[DeviceState], width: int, idle: float = 0.0
) -> list[str]:
    """Return the table of `shown`, the totals of all devices and what needs attention."""
    rows = view.rows()
    result = device_table.render_status_table(view, shown, width) if shown else []
    # instances make it `devices`
    split = any(row.device is not None and row.device.parent for row in rows)
    head = format_count(len(rows), "device" if split else "GPU")
    result += table.format_state_counts(head, states.count_device_states(rows), width)
    room = card_share_room(rows, view.held, view.node.settings.shares)
    if room and not idle:
        names = [(format_device_label(name, view.devices), *room[name]) for name in room]
        words = [f"{name}: {free} of {places} free" for name, places, free in names]
        result += table.render_facts([("shares", ", ".join(words))], width)
    if len(shown) == len(rows) and not idle:
        facts = list_attention_facts(view, rows)
        result += table.render_facts([(label, name_config(text)) for label, text in facts], width)
    return result
