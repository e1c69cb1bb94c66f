# SPDX-License-Identifier: Apache-2.0
"""`gpulock report JOB`: what a job's GPUs did, while it runs and long after."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import click

from gpulock.cli.complete import complete_job
from gpulock.cli.select import SelectError, parse_job
from gpulock.cli.session import CommandRefusedError, Session
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.report.claims import ReportedClaim
from gpulock.report.scan import ClaimQuery, HistoryFaults
from gpulock.report.sources import find_job_claims
from gpulock.report.text import advise_on_last_run, format_job_report, select_last_run

VERSION = 1


@click.command()
@click.argument("job", nargs=-1, metavar="JOB", shell_complete=complete_job)
@click.option("--last", "only_last", is_flag=True, help="Only the last run of the job.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--uid", type=click.IntRange(min=0), help="Only jobs of this user.")
@click.option("--tokens", default="", hidden=True, help="At a job's end: its claims.")
@click.option("--append", "output", default="", hidden=True, help="At a job's end: its output.")
@click.pass_obj
def report_command(  # noqa: PLR0913, PLR0917 (click: one an option)
    session: Session,
    job: tuple[str, ...],
    only_last: bool,
    as_json: bool,
    uid: int | None,
    tokens: str,
    output: str,
) -> None:
    """Report what the GPUs of JOB (12, 12.3, pid 4711) did, during or after the job.

    For an array without a task, report each task. Time not observed is never called idle.
    """
    node = session.node()
    if tokens:
        report_at_job_end(node, tokens.split(","), output)
        return
    if not job:
        raise click.UsageError("name a job: 12, 12.3 or pid 4711")
    faults = HistoryFaults()
    query = parse_report_query(" ".join(job))
    found = find_job_claims(node, query, faults, uid)
    for fault in faults.as_sentences():
        click.echo(f"gpulock: report: {fault}", err=True)
    if only_last:
        found = select_last_run(found)
    if not found:
        raise CommandRefusedError(
            f"{' '.join(job)} held no GPU that this node knows of", missing_report_hint(node)
        )
    if as_json:
        click.echo(json.dumps(build_report_document(query, found), indent=2))
        return
    click.echo("\n".join(format_job_report(found)))


def report_at_job_end(node: Node, tokens: Sequence[str], output: str) -> None:
    """Tell the job's user, where the settings want it, and whom an error would not help."""
    from gpulock.report import ending, folder

    found = ending.gather_ended_claims(node, tokens, Deadline(ending.SECONDS), time.sleep)
    if not found:
        return
    try:
        for claim in found if node.settings.report_dir else ():
            folder.write_report_file(node.settings.report_dir, claim.record)
    except OSError as fault:
        click.echo(f"gpulock: REPORT_DIR: {fault}", err=True)
    if not node.settings.report_at_end:
        return
    text = "\n".join(["", "gpulock report", *format_job_report(found), ""])
    if output:
        ending.append_report(output, click.unstyle(text))
    else:
        click.echo(text, nl=False)


def parse_report_query(text: str) -> ClaimQuery:
    """Return the job that is meant; raise Refused."""
    try:
        meant = parse_job(text)
    except SelectError as fault:
        raise CommandRefusedError(str(fault), "name a job: 12, 12.3 or pid 4711") from fault
    return meant.query()


def missing_report_hint(node: Node) -> str:
    """Return what to do where nothing is known of a job."""
    if node.settings.report_dir:
        return "it held none, or it is too long ago"
    return "ask on the node where it ran, or set REPORT_DIR on the nodes"


def build_report_document(query: ClaimQuery, found: Sequence[ReportedClaim]) -> dict[str, object]:
    """Return the report as a value: records as in the history, and the advice."""
    return {
        "version": VERSION,
        "job_id": query.job,
        "claims": [claim.record for claim in found],
        "advice": advise_on_last_run(found) or None,
    }
