# SPDX-License-Identifier: Apache-2.0
"""Tell, count and name processes of no claim that have a device open.

Warm. They keep no lock, so a release does not look at them: gpulockd does, outside the gate, and as
seldom as the node is large. What one user hides is not told; nothing depends on it.
"""

from __future__ import annotations

from typing import Final

from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_owner import find_foreign_pids
from gpulock.alloc.process_scan import ProcessScan
from gpulock.daemon.core.journal import DaemonJournal
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import Chore
from gpulock.deadline import clock_boottime
from gpulock.errors import one_line
from gpulock.node.context import Node
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.foreign import SHOWN, ForeignUse, write_foreign_uses
from gpulock.store.locks import Lock
from gpulock.store.verdicts import PERIOD

SHARE: Final = 4000  # of the time may be spent at it; 3,000 processes take 0.1 s
SECONDS: Final = 1.0  # for one look: gpulockd serves nobody meanwhile
LINES: Final = 16  # processes that are named at a time


class ForeignWatch(Chore):
    """Look now and then; `foreign` in LOCK_DIR and the journal say what was found."""

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self._next = 0.0

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Look, where that is due; raise OSError where it cannot be written."""
        if now < self._next:
            return
        begun = clock_boottime()
        judge = make_liveness_judge(node)
        held = node.store.read_all_locks()
        for lock in held.values():
            node.store.read_details(lock)
        files = OpenFiles(judge.scan, report.devices, node.settings)
        files.seconds = SECONDS
        services = node.settings.allowed_processes
        uses: dict[str, ForeignUse] = {}
        for device in report.devices:
            pids = files.pids_with_open(device.id)
            if pids := find_foreign_pids(pids, held, judge.scan, services):
                uses[device.id] = describe_use(pids, judge.scan)
        took = clock_boottime() - begun
        self._next = now + max(PERIOD / 2, SHARE * took)
        write_foreign_uses(node.store.path, uses, node.boot_id, begun, self._next)
        partial = f", at least: {files.blind}" if files.blind else ""
        self._journal.log_changes("foreign", foreign_messages(uses, held, partial))


def describe_use(pids: list[int], scan: ProcessScan) -> ForeignUse:
    """Return the processes with their users and names, as far as they are still there."""
    named: list[tuple[int, int, str]] = []
    for pid in pids:
        try:
            status = scan.status(pid)
            uid = scan.account(pid, status.uids[0])
        except (OSError, ValueError):
            continue
        if len(named) < SHOWN:
            named.append((pid, uid, one_line(status.name).replace(" ", "_")))
    return ForeignUse(len(pids), named)


def foreign_messages(
    uses: dict[str, ForeignUse], held: dict[str, Lock], partial: str
) -> dict[str, str]:
    """Return a line for each foreign process, by a key that stays while it is there. Pure."""
    devices: dict[tuple[int, int, str], list[str]] = {}
    for device, use in uses.items():
        for one in use.processes:
            devices.setdefault(one, []).append(device)
    found: dict[str, str] = {}
    for (pid, uid, name), ids in list(devices.items())[:LINES]:
        beside = " beside a claim" if any(device in held for device in ids) else ""
        text = f"foreign: process {pid} ({name}) of uid {uid}, of no claim, has"
        found[f"{pid} {name}"] = f"{text} {' '.join(ids)} open{beside}"
    if len(devices) > LINES or (uses and partial):
        found["more"] = f"foreign: {len(devices)} processes of no claim have a GPU open{partial}"
    return found
