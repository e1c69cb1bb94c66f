# SPDX-License-Identifier: Apache-2.0
"""`gpulock queue`: who waits for GPUs without a scheduler, since when, and why."""

from __future__ import annotations

import click

from gpulock.cli.claims.socket_client import request_daemon_act
from gpulock.cli.session import Session
from gpulock.cli.status.attention import why_not_served
from gpulock.daemon.core.instance_lock import find_running_daemon
from gpulock.deadline import clock_boottime
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import format_duration
from gpulock.workstation.waiting import read_waiting
from gpulock.workstation.wire import CANCEL, SocketRequest

COLUMNS = (
    Column("NUMBER", right=True),
    Column("USER"),
    Column("PID", right=True, drop=1),
    Column("WAITS", right=True),
    Column("FOR", least=8),
    Column("WHY", least=20),
)


@click.command()
@click.option("--cancel", type=click.IntRange(min=1), metavar="NUMBER", help="End a call.")
@click.pass_obj
def queue_command(session: Session, cancel: int | None) -> None:
    """Show who waits in the queue of `gpulock run` and `claim`, and why."""
    node = session.node()
    callers = read_waiting(node)
    if cancel is not None:
        request_daemon_act(node, SocketRequest(CANCEL, number=cancel))
        about = [f": {c.user}, pid {c.pid}, for {c.what}" for c in callers if c.number == cancel]
        click.echo(f"cancelled {cancel}{''.join(about)}")
        return
    if why := why_not_served(node):
        click.echo(f"gpulockd {why}")
    elif not callers:
        running = find_running_daemon(node.store.path, node.settings.proc_root)
        alone = "" if running else ": no gpulockd runs, and a run that waits without it is not seen"
        click.echo(f"nobody waits{alone}")
    if not callers:
        return
    now, rows = clock_boottime(), list[list[Cell]]()
    for one in callers:
        waited = format_duration(now - one.since)
        texts = (str(one.number), one.user, str(one.pid), waited, one.what, one.why)
        rows.append([Cell(text) for text in texts])
    click.echo("\n".join(table.render_table(COLUMNS, rows, table.terminal_width())))
