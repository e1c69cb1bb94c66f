# SPDX-License-Identifier: Apache-2.0
"""One reconcile of this node: what `gpulock reap` does once and gpulockd again and again.

Warm. Under the gate: repair, reap every dead lock, publish the verdicts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpulock.alloc.liveness import Judge
from gpulock.alloc.reaper import FREED, Reaper, ReapOutcome, make_recorded_device
from gpulock.daemon.core.background_call import NoAnswerError, PatientCaller
from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal
from gpulock.node import device_list
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.slurm import note
from gpulock.slurm.steps import EXTERN
from gpulock.store import atomic, boot, quarantine, verdicts
from gpulock.store.event_kinds import REAPED
from gpulock.store.events import note_event
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.store.repair import repair_locks

SILENT = "the NVIDIA driver does not answer"
SECONDS = 5.0  # a healthy driver answers in 30 us a card


class DriverCard(NamedTuple):
    """What the driver itself shows of one card; `uuid` is empty where it does not tell."""

    minor: int
    uuid: str


class DaemonNode(Node):
    """The node as gpulockd sees it, which must go on whatever the driver does.

    A read below /proc/driver/nvidia waits for the driver's own locks, and no signal ends it. One
    thread asks at a time: as long as one does not come back, nobody asks again.
    """

    __slots__ = ("caller", "cards")

    def __init__(self, settings: Settings, name: str = "", patience: float = SECONDS) -> None:
        super().__init__(settings, name)
        self.caller = PatientCaller[list[Device]](patience)
        self.cards: dict[str, DriverCard] = {}  # by bus id, as the driver showed them last

    def ask_driver(self) -> list[Device]:
        """Return what the driver shows, which may take for ever; raise Refusal."""
        settings = self.settings
        return device_list.read_devices(settings.driver_root, settings.sys_root)

    def devices(self, cards: list[Device] | None = None) -> list[Device]:
        """Return the devices; raise Refusal: UNKNOWN where the driver does not answer in time."""
        self.cards = {}
        try:
            devices = self.caller.ask(self.ask_driver)
        except NoAnswerError:
            raise Refusal(UNKNOWN, SILENT, "look at dmesg") from None
        self.cards = {d.bus: DriverCard(d.minor, d.uuid) for d in devices if not d.fault}
        return super().devices(devices)


@dataclass
class ReconcileReport:
    """What a reconcile did: one outcome a lock, and the records of what it put back.

    `fault` says why the verdicts could not be published, empty where they were; `blind` why
    processes could not be seen. `devices` are those the driver shows, `driver` why it shows none.
    `processes` are (pid, start) of those that keep locks alive. A chore has work for the next
    reconcile at `next_at` (CLOCK_BOOTTIME).
    """

    restored: list[Owner]
    outcomes: list[ReapOutcome]
    fault: str = ""
    blind: str = ""
    devices: list[Device] = field(default_factory=list[Device])
    driver: str = ""
    notes_lost: bool = False  # of STATE_DIR: what was out of service is not known
    processes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    next_at: float = float("inf")


class Chore:
    """Something to be done after each reconcile; it may fail, and must not wait.

    A chore that has work between the reconciles sets `due` to when that goes on; infinity: never.
    """

    due: float = float("inf")

    def run(self, node: DaemonNode, report: ReconcileReport, now: float) -> None:
        """Do it after a reconcile."""
        raise NotImplementedError

    def run_due(self, now: float) -> None:
        """Go on with it between the reconciles."""

    def close(self) -> None:
        """Let go of what runs: the daemon ends."""


def reconcile_locks(
    node: Node, judge: Judge, deadline: Deadline, dry_run: bool = False
) -> ReconcileReport:
    """Judge and reap every lock of this node; raise Refusal, or OSError where a folder fails.

    With `dry_run` nothing is changed.
    """
    devices: list[Device] = []
    driver: "Refusal | None" = None
    try:
        devices = node.devices()
    except Refusal as refusal:
        driver = refusal
    held = node.store.read_all_locks()
    if dry_run and not held:
        return ReconcileReport([], [])
    node.store.check(make=True)
    reaper = make_reaper(node, judge, devices, driver, held)
    reaper.scan_before_gate()
    with Gate(node.store, deadline):
        restored: dict[str, Owner] = {}
        if dry_run:
            reaper.held = node.store.read_all_locks()
        else:
            boot.prepare_boot(node.store, node.settings.state_dir, node.boot_id, node.name)
            boot.make_claim_folders(node.store, node.settings.state_dir, node.boot_id)
            reaper.held = repair_locks(node.store, node.boot_id, restored)
        locks = [*reaper.held.values()]
        outcomes = reaper.decide(locks) if dry_run else reaper.finish(locks)
        report = ReconcileReport([*restored.values()], outcomes)
        report.devices, report.driver = devices, driver.why if driver else ""
        mark = f"{node.settings.state_dir}/{quarantine.LOST_MARK}"
        report.notes_lost = os.path.lexists(mark)
        scan = reaper.judge.scan
        report.blind = scan.blind or reaper.files.blind
        if scan.never_settled and report.blind not in {one.reason for one in report.outcomes}:
            report.blind = reaper.files.blind  # who forks all the time holds up no lock of others
        if not dry_run:
            report.fault = publish_outcomes(node, reaper.judge, report)
    isolated = node.settings.isolation != "off" or os.path.lexists(f"{node.store.root}/isolation")
    if isolated and not dry_run:
        from gpulock.isolation import job

        report.fault = report.fault or job.clean_up_isolation(node)
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
        reaper.files.devices_unknown = driver.why
    return reaper


def publish_outcomes(node: Node, judge: Judge, report: ReconcileReport) -> str:
    """Write verdicts, events, and what STATE_DIR lacks; return what fails, or nothing; gate held.

    The notes of runs that are over go.
    """
    store, state_dir, outcomes = node.store, node.settings.state_dir, report.outcomes
    left = {
        one.lock.owner.token: one.verdict for one in outcomes if one.act != FREED and one.lock.owner
    }
    try:
        for outcome in outcomes:
            if outcome.act != FREED and outcome.lock.owner:
                report.processes += list_owner_processes(node, judge, outcome)
        verdicts.write_verdicts(store.path, left, node.boot_id)
        freed = [outcome for outcome in outcomes if outcome.act == FREED]
        for outcome in freed:
            note_event(store.path, REAPED, outcome.verdict.by)
        for record in [outcome.lock.owner for outcome in freed]:
            if record is not None and record.scheduler == "slurm":
                own = note.TaskNote(record.slurmd, record.job_id, record.uid, record.restart)
                note.remove_task_note(store, own, set())
        try:
            known = atomic.read_text(f"{state_dir}/boot_id").strip()
        except OSError:
            known = ""
        if known != node.boot_id:  # without it records could be lost unseen
            boot.write_boot_id(f"{state_dir}/boot_id", node.boot_id.encode() + b"\n")
    except OSError as fault:
        return f"{fault.filename or store.path}: {fault.strerror}"
    return ""


def list_owner_processes(node: Node, judge: Judge, outcome: ReapOutcome) -> list[tuple[int, int]]:
    """Return (pid, start) of the processes that keep a lock alive, start 0 of one that has ended.

    Where the owner is gone it is the one that the verdict names: what cannot be seen is none. That
    the extern step of a Slurm job was seen is noted: from then on its absence counts. Raises
    OSError.
    """
    lock, pids = outcome.lock, set[int]()
    processes, record = lock.shepherds(), lock.owner
    if outcome.verdict.state != verdicts.UNKNOWN:
        pids = {verdicts.process_in_proof(outcome.reason)} - {0}
    if record is not None and record.scheduler == "slurm":
        job = judge.job_processes(lock)
        if EXTERN in job.daemons.values() and not lock.seen:
            node.store.mark_seen(record.token)
        pids |= {*job.daemons, *job.pids}
    for pid in pids - {known for known, _ in processes}:
        try:
            processes.append((pid, node.proc.start(pid)))
        except ProcessLookupError:
            processes.append((pid, 0))
        except ValueError:
            continue
    return processes
