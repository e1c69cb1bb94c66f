# SPDX-License-Identifier: Apache-2.0
"""`gpulock report JOB`: what a job's GPUs did, while it runs and long after."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence

import click

from gpulock.cli.select import SelectError, subject
from gpulock.cli.session import Refused, Session
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.report import js1
from gpulock.report.bars import ASCII, charset
from gpulock.report.claims import Claim
from gpulock.report.scan import Faults, Query
from gpulock.report.sources import claims_of
from gpulock.report.text import advice_of, last_run, lines

VERSION = 1


@click.command()
@click.argument("job", nargs=-1, metavar="JOB")
@click.option("--last", "only_last", is_flag=True, help="Of a job that ran again: the last run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/reports.md).")
@click.option("--js1", "as_js1", is_flag=True, help="Print the AdminComment of jobstats.")
@click.option("--uid", type=click.IntRange(min=0), help="Only if it is this user's job.")
@click.option("--tokens", default="", hidden=True, help="At a job's end: its claims.")
@click.option("--append", "output", default="", hidden=True, help="At a job's end: its output.")
@click.pass_obj
def report(
    session: Session,
    job: tuple[str, ...],
    only_last: bool,
    as_json: bool,
    as_js1: bool,
    uid: int | None,
    tokens: str,
    output: str,
) -> None:
    """Show what the GPUs of JOB (12, 12.3, pid 4711) did, while it runs or afterwards.

    Of an array without a task: each of its tasks. What was not observed is not called idle.
    """
    node = session.node()
    if tokens:
        at_end(node, tokens.split(","), output)
        return
    if not job:
        raise click.UsageError("name a job: 12, 12.3 or pid 4711")
    faults = Faults()
    query = query_of(" ".join(job))
    found = claims_of(node, query, faults, uid)
    for fault in faults.told():
        click.echo(f"gpulock: report: {fault}", err=True)
    if only_last or as_js1:
        found = last_run(found)
    if as_js1:
        click.echo(js1.comment(found))
        return
    if not found:
        raise Refused(f"{' '.join(job)} held no GPU that this node knows of", hint(node))
    if as_json:
        click.echo(json.dumps(document(query, found), indent=2))
        return
    chars = charset(os.environ, getattr(sys.stdout, "encoding", None) or "")
    click.echo("\n".join(lines(found, chars)))


def at_end(node: Node, tokens: Sequence[str], output: str) -> None:
    """Tell the job's user, where the settings want it, and whom an error would not help."""
    from gpulock.report import ending

    found = ending.gathered(node, tokens, Deadline(ending.SECONDS), time.sleep)
    if not found:
        return
    try:
        if node.settings.report_dir:
            ending.file_all(node.settings.report_dir, found)
    except OSError as fault:
        click.echo(f"gpulock: REPORT_DIR: {fault}", err=True)
    if not node.settings.report_at_end:
        return
    text = "\n".join(["", "gpulock report", *lines(found, ASCII), ""])
    if output:
        ending.append(output, click.unstyle(text))
    else:
        click.echo(text, nl=False)


def query_of(text: str) -> Query:
    """Return the job that is meant; raise Refused."""
    try:
        meant = subject(text, ())
    except SelectError as fault:
        raise Refused(str(fault), "name a job: 12, 12.3 or pid 4711") from fault
    if meant.pid:
        return Query(job=str(meant.pid), scheduler="process")
    return Query(job=meant.job, task=meant.task)


def hint(node: Node) -> str:
    """Return what to do where nothing is known of a job."""
    if node.settings.report_dir:
        return "it held none, or it is too long ago"
    return "ask on the node where it ran, or set REPORT_DIR on the nodes"


def document(query: Query, found: Sequence[Claim]) -> dict[str, object]:
    """Return the report as a value: records as in the history, and the advice."""
    return {
        "version": VERSION,
        "job_id": query.job,
        "claims": [claim.record for claim in found],
        "advice": advice_of(found) or None,
    }
