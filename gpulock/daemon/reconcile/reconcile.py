# SPDX-License-Identifier: Apache-2.0
"""One reconcile of this node: what `gpulock reap` does once and gpulockd again and again.

Warm. Under the gate: adopt where locks were lost, reap every dead lock, publish the verdicts.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from gpulock.alloc.liveness import Judge
from gpulock.alloc.reaper import FREED, Reaper, ReapOutcome, make_recorded_device, reap_locks
from gpulock.daemon.reconcile import adopt
from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal, lost_locks_refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.slurm import note
from gpulock.store import adoption_state, atomic, boot, quarantine, verdicts
from gpulock.store.counters import ClaimCounters
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner


class DriverCard(NamedTuple):
    """What the driver itself shows of one card; `uuid` is empty where it does not tell."""

    minor: int
    uuid: str


@dataclass
class ReconcileReport:
    """What a reconcile did: one outcome a lock, and the records it adopted.

    `fault` says why the verdicts could not be published, empty where they were; `blind` why
    processes could not be seen. `devices` are those the driver shows, `driver` why it shows none;
    `cards` by bus id what it shows without NVML's help, where the node knows that.
    """

    adopted: list[Owner]
    outcomes: list[ReapOutcome]
    fault: str = ""
    blind: str = ""
    devices: list[Device] = field(default_factory=list[Device])
    driver: str = ""
    notes_lost: bool = False  # of STATE_DIR: what was out of service is not known
    cards: dict[str, DriverCard] = field(default_factory=dict[str, DriverCard])


def reconcile_locks(
    node: Node,
    judge: Judge,
    deadline: Deadline,
    dry_run: bool = False,
    stood: Sequence[Lock] = (),
) -> ReconcileReport:
    """Judge and reap every lock of this node; raise Refusal, or OSError where LOCK_DIR fails.

    With `dry_run` nothing is changed. `stood` are the locks that the last reconcile left, where
    that is known.
    """
    devices: list[Device] = []
    driver: "Refusal | None" = None
    try:
        devices = node.devices()
    except Refusal as refusal:
        driver = refusal
    if dry_run and not node.store.exists():
        return ReconcileReport([], [])
    node.store.check(make=True)
    ahead: "Reaper | None" = None
    with suppress(Refusal):  # what is lost is put back under the gate
        locks = node.store.read_all_locks()
        ahead = make_reaper(node, judge, devices, driver, locks)
        ahead.judge_ahead()
    with Gate(node.store, deadline, node.settings.gate_timeout):
        if not dry_run and node.store.boot_id() == node.boot_id:
            boot.make_claim_folders(node.store, node.settings.state_dir, node.boot_id)
            held = node.store.read_all_locks()
            if gone := [lock for lock in stood if lock.id not in held]:
                adopt.remember_grants(node, judge.renew(), gone, held)
            adopted = adopt.put_back_lost_locks(node, judge, held)
        else:
            held = {}
            adopted = [] if dry_run else begin_boot_or_adopt(node, judge.renew())
        if adopted or not held:
            held = read_locks_after_adoption(node, adopted)
        if adopted or ahead is None:
            ahead = make_reaper(node, judge.renew(), devices, driver, held)
        reaper, reaper.held = ahead, held
        report = ReconcileReport(adopted, reap_locks(reaper, dry_run))
        report.devices, report.driver = devices, driver.why if driver else ""
        mark = f"{node.settings.state_dir}/{quarantine.LOST_MARK}"
        report.notes_lost = os.path.lexists(mark)
        scan = reaper.judge.scan
        report.blind = scan.blind or reaper.files.blind
        if scan.restless and report.blind not in {one.reason for one in report.outcomes}:
            report.blind = reaper.files.blind  # who forks all the time holds up no lock of others
        if not dry_run:
            report.fault = publish_outcomes(node, report.outcomes)
    isolated = node.settings.isolation != "off" or os.path.lexists(f"{node.store.path}/isolation")
    if isolated and not dry_run:
        from gpulock.isolation import cleanup

        report.fault = report.fault or cleanup.clean_up_isolation(node)
    return report


def make_reaper(
    node: Node,
    judge: Judge,
    devices: Sequence[Device],
    driver: "Refusal | None",
    held: dict[str, Lock],
) -> Reaper:
    """Return what judges these locks, on a node whose driver shows these devices.

    A card that fell off the bus is still open; without any driver nothing can be.
    """
    shown = {device.id for device in devices if device.minor >= 0}
    hidden = [lock for lock in held.values() if lock.owner and lock.id not in shown]
    more = [device for lock in hidden if (device := make_recorded_device(lock))]
    reaper = Reaper(node, judge, [*devices, *more], held)
    if len(more) < len(hidden) and driver and driver.kind == UNKNOWN:
        reaper.files.dark = driver.why
    return reaper


def read_locks_after_adoption(node: Node, adopted: list[Owner]) -> dict[str, Lock]:
    """Return every lock, gate held; raise Refusal where what was put back is gone again.

    LOCK_DIR is being removed then, and counts as lost, although its boot id was written: the next
    reconcile puts all of it back.
    """
    try:
        held = node.store.read_all_locks()
        for name in [name for one in adopted for name in one.devices]:
            if name not in held or not (held[name].owner or held[name].fault):
                raise lost_locks_refusal(f"the locks of {name}")
    except Refusal:
        if adopted:
            atomic.remove_quietly(f"{node.store.root}/boot_id")
        raise
    return held


def begin_boot_or_adopt(node: Node, judge: Judge) -> list[Owner]:
    """Make the lock directory ready for this boot, adopting what was lost within it."""
    state_dir = node.settings.state_dir
    lost = boot.may_be_claimed_boot(state_dir, node.boot_id)
    if lost:
        adopt.require_processes_seen(judge.scan)
    boot.make_claim_folders(node.store, state_dir, node.boot_id)
    if lost:
        boot.mark_locks_lost(node.store)
        adopt.check_records_complete(node)
    held = node.store.read_all_locks()
    adopted = {one.token: one for one in adopt.put_back_lost_locks(node, judge, held)}
    if lost:
        adopted |= {one.token: one for one in adopt.adopt_lost_locks(node, judge.scan)}
    boot.begin_boot(node.store, state_dir, node.boot_id, node.name)
    return list(adopted.values())


def publish_outcomes(node: Node, outcomes: list[ReapOutcome]) -> str:
    """Write verdicts, counters, and what STATE_DIR lacks; return what fails, or nothing; gate held.

    Of which Slurm jobs the extern step was seen is noted: from then on its absence counts. The
    notes of runs that are over go.
    """
    store, state_dir = node.store, node.settings.state_dir
    left = {o.lock.owner.token: o.verdict for o in outcomes if o.act != FREED and o.lock.owner}
    try:
        for outcome in outcomes:
            if outcome.act != FREED and outcome.lock.extern and not outcome.lock.seen:
                store.mark_seen(outcome.lock.id)
        verdicts.write_verdicts(store.root, left, node.boot_id)
        totals = ClaimCounters(store)
        freed = [outcome for outcome in outcomes if outcome.act == FREED]
        for outcome in freed:
            totals.count_reap(outcome.verdict.proof)
        totals.save()
        for record in [outcome.lock.owner for outcome in freed]:
            if record is not None and record.scheduler == "slurm":
                who = record.slurmd, record.job_id, record.uid, record.restart
                note.remove_task_note(store, *who)
        try:
            known = atomic.read_text(f"{state_dir}/boot_id").strip()
        except OSError:
            known = ""
        if known != node.boot_id:  # without it LOCK_DIR could be lost unseen
            boot.write_boot_id(f"{state_dir}/boot_id", node.boot_id.encode() + b"\n")
        if not os.path.lexists(f"{state_dir}/{adoption_state.WHOLE}"):
            adopt.write_missing_records(node)
    except OSError as fault:
        where = str(fault.filename or store.path).replace(store.root, store.path)
        return f"{where}: {fault.strerror}"
    return ""
