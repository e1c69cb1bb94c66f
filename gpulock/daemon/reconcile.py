# SPDX-License-Identifier: Apache-2.0
"""One reconcile of this node: what `gpulock reap` does once and gpulockd again and again.

Warm. Under the gate: adopt where locks were lost, settle every lock, publish the verdicts.
"""

import os

from gpulock import atomic, boot, verdicts
from gpulock.daemon import adopt
from gpulock.deadline import Deadline
from gpulock.gate import Gate
from gpulock.liveness import Judge
from gpulock.node import Node
from gpulock.owner import Owner
from gpulock.refusal import UNKNOWN, Refusal
from gpulock.release import present
from gpulock.settle import FREED, Outcome, make_holders, settle
from gpulock.slurm import note
from gpulock.supply import count_reaps
from gpulock.totals import Totals

WRITTEN = ("boot_id", "lost", "totals", "verdicts")  # under the gate alone


class Report:
    """What a reconcile did: one outcome a lock, and the records it adopted.

    `fault` says why the verdicts could not be published, empty where they were.
    """

    __slots__ = ("adopted", "fault", "outcomes")

    def __init__(self, adopted: list[Owner], outcomes: list[Outcome]) -> None:
        self.adopted = adopted
        self.outcomes = outcomes
        self.fault = ""


def reconcile(node: Node, judge: Judge, deadline: Deadline, dry_run: bool = False) -> Report:
    """Settle every lock of this node; raise Refusal, or OSError where LOCK_DIR fails.

    With `dry_run` nothing is changed. Without a driver there is no device that could be open.
    """
    devices = present(node)
    if not node.store.exists() and dry_run:
        return Report([], [])
    boot.ensure(node.store)
    holders = make_holders(node, devices, judge)
    with Gate(node.store.path, deadline.sooner(node.settings.gate_timeout)):
        adopted = [] if dry_run else begin(node, judge)
        held = node.store.all()
        report = Report(adopted, settle(node, held, judge, holders, dry_run))
        if not dry_run:
            try:
                note_seen(node, report.outcomes)
                publish(node, report.outcomes)
                sweep(node)
            except OSError as fault:
                report.fault = f"{node.store.path}: {fault.strerror}"
    return report


def begin(node: Node, judge: Judge) -> list[Owner]:
    """Make the lock directory ready for this boot, adopting what was lost within it."""
    if node.store.boot_id() == node.boot_id:
        boot.folders(node.store, node.settings.state_dir)
        return []
    if boot.state_boot_id(node.settings.state_dir) != node.boot_id:
        boot.begin(node.store, node.settings.state_dir, node.boot_id, node.name)
        return []
    judge.scan.statuses()
    if judge.scan.blind:
        raise Refusal(UNKNOWN, judge.scan.blind, "run gpulock reap where all processes show")
    boot.folders(node.store, node.settings.state_dir)
    boot.mark_lost(node.store)
    adopted = adopt.adopt(node, judge.scan)
    boot.begin(node.store, node.settings.state_dir, node.boot_id, node.name)
    return adopted


def note_seen(node: Node, outcomes: list[Outcome]) -> None:
    """Note of which Slurm jobs the extern step was seen: from then on its absence counts."""
    for outcome in outcomes:
        if outcome.act != FREED and outcome.lock.extern and not outcome.lock.seen:
            node.store.mark_seen(outcome.lock.id)


def publish(node: Node, outcomes: list[Outcome]) -> None:
    """Write verdicts and counters, and drop the notes of runs that are over."""
    left = {o.lock.owner.token: o.verdict for o in outcomes if o.act != FREED and o.lock.owner}
    verdicts.write(node.store.path, left, node.boot_id)
    totals = Totals(node.store)
    count_reaps(totals, outcomes)
    totals.save()
    for outcome in outcomes:
        record = outcome.lock.owner
        if outcome.act != FREED or record is None:
            continue
        if record.scheduler == "slurm":
            who = record.slurmd, record.job_id, record.uid, record.restart
            note.remove(node.store, *who)


def sweep(node: Node) -> None:
    """Remove what a killed process left half written in LOCK_DIR, gate held."""
    for name in os.listdir(node.store.path):
        if any([name.startswith(f".{file}.") for file in WRITTEN]):
            atomic.remove_quietly(f"{node.store.path}/{name}")
