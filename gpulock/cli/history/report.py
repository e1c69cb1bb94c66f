# SPDX-License-Identifier: Apache-2.0
"""`gpulock report JOB`: what a job's GPUs did, while it runs and long after."""

from __future__ import annotations

import json

import click

from gpulock.cli.select import parse_bare_pid, parse_job
from gpulock.cli.session import CommandRefusedError, Session
from gpulock.report.scan import HistoryFaults
from gpulock.report.sources import find_job_claims
from gpulock.report.text import advise_on_last_run, format_job_report

VERSION = 1


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
    found = find_job_claims(node, meant.query(), faults)
    if not found and (process := parse_bare_pid(" ".join(job))).pid:
        meant, faults = process, HistoryFaults()
        found = find_job_claims(node, meant.query(), faults)
    for unread in faults.as_sentences():
        click.echo(f"gpulock: report: {unread}", err=True)
    if not found:
        why = f"{' '.join(job)} held no GPU that this node knows of"
        raise CommandRefusedError(why, "ask on the node where it ran")
    if as_json:
        records = [claim.record for claim in found]
        about = {"version": VERSION, "job_id": meant.query().job, "claims": records}
        click.echo(json.dumps({**about, "advice": advise_on_last_run(found) or None}, indent=2))
    else:
        click.echo("\n".join(format_job_report(found)))
