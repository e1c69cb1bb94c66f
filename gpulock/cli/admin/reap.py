# SPDX-License-Identifier: Apache-2.0
"""`gpulock reap`: one reconcile of this node, told line by line."""

from __future__ import annotations

from functools import partial

import click

from gpulock.alloc.reaper import FREED, HELD, ORPHANS
from gpulock.cli.session import Session, name_config
from gpulock.daemon.core.journal import ERROR, DaemonJournal
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.reconcile.cdi import CdiSpecWriter
from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.daemon.reconcile.temporaries import TemporaryRemover
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, Refusal
from gpulock.node.context import Node
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.text.table import paint_text
from gpulock.text.words import (
    FORCE,
    format_count,
    format_device_label,
    format_device_list,
    format_lock_holder,
)

REAP_SECONDS = 120.0
RESTORED, WOULD_FREE = "restored", "would free"
COLOURS: dict[str, str] = {
    **{FREED: "green", HELD: "cyan", ORPHANS: "magenta"},
    **{RESTORED: "yellow", WOULD_FREE: "green"},
}
ACT_WIDTH = 12


@click.command()
@click.option("--dry-run", is_flag=True, help="Print what would be freed; change nothing.")
@click.pass_obj
def reap_command(session: Session, dry_run: bool) -> None:
    """Free what dead owners hold, put back what was lost, publish the verdicts,
    and, where no gpulockd runs, write the history and the CDI spec."""
    node = session.writable_node()
    report = reconcile_locks(node, make_liveness_judge(node), Deadline(REAP_SECONDS), dry_run)
    lines = format_reap_report(node, report, dry_run)
    click.echo(name_config("\n".join(lines)))
    if not dry_run:
        journal = DaemonJournal(quiet=True, who="gpulock: reap")  # no fault of these fails a reap
        writer = HistoryWriter(partial(journal.say, ERROR))
        for chore in (writer, CdiSpecWriter(journal), TemporaryRemover()):
            chore.run(node, report, clock_boottime())
    if report.fault:
        raise Refusal(
            BROKEN, f"the verdicts cannot be published: {report.fault}", "make room there"
        )


def format_reap_report(node: Node, report: ReconcileReport, dry_run: bool = False) -> list[str]:
    """Return a line for each claim put back, and for each that was judged; then the sum."""
    devices = node.devices_if_driver()
    groups: dict[tuple[str, str], list[str]] = {}
    for record in report.restored:
        why = f"{format_lock_holder(record)}, whose lock or record was lost"
        groups.setdefault((RESTORED, why), []).extend(record.devices)
    for outcome in report.outcomes:
        lock = outcome.lock
        why = f"{format_lock_holder(lock.owner)}: " if lock.owner else ""
        why += outcome.reason
        if outcome.act == HELD and lock.fault:
            name = format_device_label(lock.id, devices).removeprefix("GPU ")
            why += f"; no reap frees it, but {FORCE.format(name)}"
        act = WOULD_FREE if dry_run and outcome.act == FREED else outcome.act
        # the locks of one claim have one fate, but for a device that is still open
        groups.setdefault((act, why), []).append(lock.id)
    lines = [
        f"{paint_text(act, COLOURS[act])}{' ' * (ACT_WIDTH - len(act))}"
        f"{format_device_list(ids, devices)}: {why}"
        for (act, why), ids in groups.items()
    ]
    freed = len([outcome for outcome in report.outcomes if outcome.act == FREED])
    verb = "would be freed" if dry_run else "freed"
    return [*lines, f"{format_count(len(report.outcomes), 'lock')}: {freed} {verb}"]
