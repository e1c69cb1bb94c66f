# SPDX-License-Identifier: Apache-2.0
"""`gpulock history` and `report JOB`: what the GPUs of claims did, while they stand and long after.

Options and their answers; sums and texts are made in `gpulock.report`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import click

from gpulock.cli.select import SelectError, Subject, parse_bare_pid, parse_job, resolve_device_id
from gpulock.cli.session import CommandRefusedError, Session, echo_wrapped, name_config, parse_time
from gpulock.node.context import Node
from gpulock.report.claims import GpuTimes, ReportedClaim
from gpulock.report.scan import (
    ClaimQuery,
    HistoryFaults,
    find_history_heads,
    parse_heads,
    sum_claims,
)
from gpulock.report.sources import find_job_claims, find_unwritten_claims
from gpulock.report.text import (
    CLAIM_COLUMNS,
    advise_on_last_run,
    claim_cells,
    format_gpu_hours,
    format_hours,
    format_job_report,
)
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import format_count, format_percent

VERSION = 1
REFUSED = 1  # exit code
LAST = 50  # claims that a table lists unless told otherwise
SUM_FIELDS = ("gpu_seconds", "busy_seconds", "idle_seconds", "unobserved_seconds")
SUMS = ("CLAIMS", "GPU HOURS", "BUSY", "IDLE", "UNSEEN", "USE")


@click.command()
@click.option("--user", metavar="NAME", help="Claims of this user.")
@click.option("--job", metavar="JOB", help="Of this job: 12, 12.3 or 'pid 4711'.")
@click.option(
    "--device",
    metavar="DEVICE",
    help="With this device: index, UUID, or bus id, though it is gone.",
)
@click.option("--since", metavar="TIME", help="Ended since then: 7d, 12h, 14:00, 2026-11-01.")
@click.option("--until", metavar="TIME", help="Ended before then, in the same form.")
@click.option(
    "--by", type=click.Choice(["user", "device", "queue"]), help="Sums instead of claims."
)
@click.option(
    "--last",
    "limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Number of claims; 0: all.  [default: {LAST}; with --json all]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def history_command(
    session: Session,
    /,
    by: str | None,
    limit: int | None,
    as_json: bool,
    **which: str | None,
) -> None:
    """Show this node's finished claims and GPU hours, in the order in which they were written."""
    node = session.node()
    query = parse_history_query(node, **which)
    faults = HistoryFaults()
    if by:
        heads = find_history_heads(node, query, faults)
        print_history_sums(sum_claims(heads, faults, by, query.device), by, as_json)
    elif as_json:
        heads = find_history_heads(node, query, faults, limit or 0)
        print_claims_json(parse_heads(heads, faults))
    else:
        print_history_claims(node, query, faults, LAST if limit is None else limit)
    if unwritten := find_unwritten_claims(node, query, faults):
        over = format_count(len(unwritten), "claim")
        text = f"{over} {'are' if unwritten[1:] else 'is'} over and not yet written"
        echo_wrapped(f"gpulock: history: {text}: gpulockd or gpulock reap does it")
    for fault in faults.as_sentences():
        click.echo(f"gpulock: history: {fault}", err=True)
    if faults.files:
        click.get_current_context().exit(REFUSED)  # no script is to take it for no hours


def parse_history_query(
    node: Node,
    user: str | None,
    job: str | None,
    device: str | None,
    since: str | None,
    until: str | None,
) -> ClaimQuery:
    """Return what is asked for; raise click.UsageError, also for what was given empty."""
    now = time.time()
    if user == "":
        raise click.UsageError("--user needs a name")
    name = user or ""
    try:
        begin = 0.0 if since is None else parse_time(since, now)
        end = float("inf") if until is None else parse_time(until, now)
        meant = Subject() if job is None else parse_job(job)
        device_id = "" if device is None else resolve_device_id(device, node.devices_if_driver())
    except (ValueError, SelectError) as fault:
        raise click.UsageError(name_config(str(fault))) from fault
    return meant.query(since=begin, until=end, user=name, device=device_id)


def print_history_claims(node: Node, query: ClaimQuery, faults: HistoryFaults, limit: int) -> None:
    """Print the table of the latest claims, and their sum."""
    heads = [*find_history_heads(node, query, faults, limit and limit + 1)]
    shown = heads[-limit:]
    rows = [claim_cells(claim) for claim in parse_heads(shown, faults)]
    if rows:
        click.echo("\n".join(table.render_table(CLAIM_COLUMNS, rows, table.terminal_width())))
    if len(shown) < len(heads):
        click.echo("earlier claims are not shown: --last 0 shows all, --by user sums all")
    total = sum_claims(shown, faults, "", query.device).get("", GpuTimes())
    if not rows and faults.files:
        return
    if total.claims:
        click.echo(f"{format_count(total.claims, 'claim')}: {format_gpu_hours(total)}")
    else:
        click.echo("no finished claim")


def print_history_sums(totals: dict[str, GpuTimes], by: str, as_json: bool) -> None:
    """Print sums, the largest first."""
    columns = [Column(by.upper(), least=8), *(Column(name, right=True) for name in SUMS)]
    rows: list[dict[str, object]] = []
    cells: list[list[Cell]] = []
    for name, one in sorted(totals.items(), key=lambda pair: (-pair[1].held, pair[0])):
        times = (one.held, *one.parts)
        sums = {key: round(value, 3) for key, value in zip(SUM_FIELDS, times)}
        rows.append({by: name, "claims": one.claims, **sums})
        texts = [name or "-", f"{one.claims:,}", *map(format_hours, times)]
        cells.append([Cell(text) for text in [*texts, format_percent(one.utilization)]])
    if as_json:
        click.echo(json.dumps({"version": VERSION, "by": by, "sums": rows}, indent=2))
    else:
        click.echo("\n".join(table.render_table(columns, cells, table.terminal_width())))


def print_claims_json(claims: Iterable[ReportedClaim]) -> None:
    """Print the records, one after another: there may be a million."""
    click.echo(f'{{"version": {VERSION}, "claims": [')
    comma = ""
    for claim in claims:
        click.echo(comma + json.dumps(claim.record), nl=False)
        comma = ",\n"
    click.echo("\n]}")


@click.command()
@click.argument("job", nargs=-1, metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def report_command(session: Session, job: tuple[str, ...], as_json: bool) -> None:
    """Report what the GPUs of JOB (12, 12.3, pid 4711) did, during or after the job.

    For an array without a task, report each task. Time not observed is never called idle.
    """
    node = session.node()
    if not job:
        raise click.UsageError("name a job: 12, 12.3 or pid 4711")
    meant = parse_job(" ".join(job))
    faults = HistoryFaults()
    claims = find_job_claims(node, meant.query(), faults)
    if not claims and (process := parse_bare_pid(" ".join(job))).pid:
        meant, faults = process, HistoryFaults()
        claims = find_job_claims(node, meant.query(), faults)
    for unread in faults.as_sentences():
        click.echo(f"gpulock: report: {unread}", err=True)
    if not claims:
        if faults.files:
            raise CommandRefusedError("so it is not known what the job held", "ask as root")
        why = f"{' '.join(job)} held no GPU that this node knows of"
        raise CommandRefusedError(why, "ask on the node where it ran")
    if as_json:
        records = [claim.record for claim in claims]
        about = {"version": VERSION, "job_id": meant.query().job, "claims": records}
        click.echo(json.dumps({**about, "advice": advise_on_last_run(claims) or None}, indent=2))
    else:
        click.echo("\n".join(format_job_report(claims)))
