# SPDX-License-Identifier: Apache-2.0
"""`gpulock reap`: one reconcile of this node, told line by line."""

from __future__ import annotations

import click

from gpulock.cli.session import Session
from gpulock.cli.table import paint
from gpulock.cli.words import holder, label_of, listing
from gpulock.daemon.process import judge
from gpulock.daemon.reconcile import Report, present, reconcile
from gpulock.deadline import Deadline
from gpulock.devices import Device
from gpulock.settle import FREED, HELD, ORPHANS, Outcome

REAP_SECONDS = 120.0
COLOURS = {FREED: "green", HELD: "cyan", ORPHANS: "magenta"}
ACT_WIDTH = 10


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@click.pass_obj
def reap(session: Session, dry_run: bool) -> None:
    """Free what dead owners hold, put back what was lost, and publish the verdicts."""
    node = session.own_node()
    report = reconcile(node, judge(node), Deadline(REAP_SECONDS), dry_run)
    click.echo("\n".join(lines(report, present(node), dry_run)))


def lines(report: Report, devices: list[Device], dry_run: bool = False) -> list[str]:
    """Return a line for each adopted claim and each lock, then the sum."""
    result = [
        f"{paint('adopted'.ljust(ACT_WIDTH), 'yellow')}{listing(record.devices, devices)}: "
        f"{holder(record)} is alive, its lock is put back"
        for record in report.adopted
    ]
    result += [line(outcome, devices, dry_run) for outcome in report.outcomes]
    freed = len([outcome for outcome in report.outcomes if outcome.act == FREED])
    verb = "would be freed" if dry_run else "freed"
    return [*result, f"{len(report.outcomes)} locks: {freed} {verb}"]


def line(outcome: Outcome, devices: list[Device], dry_run: bool) -> str:
    """Return what became of one lock, of whom, and the proof."""
    record = outcome.lock.owner
    act = "would free" if dry_run and outcome.act == FREED else outcome.act
    whose = f"{holder(record)}: " if record else ""
    where = label_of(outcome.lock.id, devices)
    word = paint(act.ljust(ACT_WIDTH), COLOURS[outcome.act])
    space = "" if word.endswith(" ") or act != "would free" else " "
    return f"{word}{space}{where}: {whose}{outcome.reason}"
