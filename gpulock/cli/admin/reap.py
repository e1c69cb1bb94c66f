# SPDX-License-Identifier: Apache-2.0
"""`gpulock reap`: one reconcile of this node, told line by line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from gpulock.alloc.reaper import FREED, HELD, ORPHANS
from gpulock.cli.session import Session, name_config
from gpulock.cli.status.status_view import find_stray_path
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.daemon.reconcile.temporaries import TemporaryRemover
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.locks import Lock
from gpulock.text.table import paint_text
from gpulock.text.words import (
    FORCE,
    format_count,
    format_device_label,
    format_device_list,
    format_lock_holder,
)

if TYPE_CHECKING:
    from gpulock.alloc.reaper import ReapAct

REAP_SECONDS = 120.0
COLOURS = {FREED: "green", HELD: "cyan", ORPHANS: "magenta"}
ACT_WIDTH = 12


@click.command()
@click.option("--dry-run", is_flag=True, help="Print what would be done; change nothing.")
@click.pass_obj
def reap_command(session: Session, dry_run: bool) -> None:
    """Free what dead owners hold, put back what was lost, publish the verdicts,
    and write finished claims into the history."""
    node = session.writable_node()
    report = reconcile_locks(node, make_liveness_judge(node), Deadline(REAP_SECONDS), dry_run)
    told = format_reap_report(node, report, dry_run)
    click.echo(name_config("\n".join(told)))
    if not dry_run:
        HistoryWriter(warn_history_fault).run(node, report, clock_boottime())
        TemporaryRemover().run(node, report, clock_boottime())
    if report.fault:
        raise Refusal(
            BROKEN, f"the verdicts cannot be published: {report.fault}", "make room there"
        )


def warn_history_fault(line: str) -> None:
    """Tell what keeps finished claims out of the history; that fails no reap."""
    click.echo(f"gpulock: reap: {line}", err=True)


def format_reap_report(node: Node, report: ReconcileReport, dry_run: bool = False) -> list[str]:
    """Return a line for each claim put back, and for each that was judged; then the sum."""
    devices = node.devices_if_driver()
    result = [
        format_reap_line(
            "restored",
            "yellow",
            record.devices,
            devices,
            f"{format_lock_holder(record)}, whose lock or record was lost",
        )
        for record in report.restored
    ]
    groups: dict[tuple[ReapAct, str], list[str]] = {}
    for outcome in report.outcomes:
        record = outcome.lock.owner
        whose = f"{format_lock_holder(record)}: " if record else ""
        reason = outcome.reason
        if outcome.act == HELD and outcome.lock.fault:
            reason += f"; no reap frees it, but {unreadable_lock_hint(node, outcome.lock, devices)}"
        # the locks of one claim have one fate, but for a device that is still open
        groups.setdefault((outcome.act, whose + reason), []).append(outcome.lock.id)
    for (act, why), ids in groups.items():
        result.append(
            format_reap_line(
                "would free" if dry_run and act == FREED else act, COLOURS[act], ids, devices, why
            )
        )
    freed = len([outcome for outcome in report.outcomes if outcome.act == FREED])
    verb = "would be freed" if dry_run else "freed"
    return [*result, f"{format_count(len(report.outcomes), 'lock')}: {freed} {verb}"]


def unreadable_lock_hint(node: Node, lock: Lock, devices: list[Device]) -> str:
    """Return the command that frees a lock which cannot be read, or the one that says what does."""
    name = format_device_label(lock.id, devices).removeprefix("GPU ")
    return f"see gpulock why {name}" if find_stray_path(node, lock) else FORCE.format(name)


def format_reap_line(
    act: str, colour: str, ids: Iterable[str], devices: list[Device], why: str
) -> str:
    """Return what became of some locks, of whom, and the proof."""
    gap = " " * (ACT_WIDTH - len(act))
    return f"{paint_text(act, colour)}{gap}{format_device_list(ids, devices)}: {why}"
