# SPDX-License-Identifier: Apache-2.0
"""Look at a node without changing it: what `status` and `why` show.

Everybody reads the verdicts of the last reconcile. The owner of LOCK_DIR, who sees everything,
judges in place as well, outside the gate: nothing is freed and nothing written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from gpulock.alloc import states
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.node_view import read_node_view
from gpulock.alloc.process_owner import find_foreign_pids
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.states import NodeView
from gpulock.cli.status.device_use import SampleView, read_sample_view
from gpulock.deadline import clock_boottime
from gpulock.node.context import Node
from gpulock.node.devices import Device, lock_ids_overlap
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.process_scan import ClaimMembership


class StatusView(NodeView):
    """A node as status shows it: with the driver's devices and what the exporter saw."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.boottime, self.now = clock_boottime(), time.time()
        self.devices: list[Device] = node.devices()
        if os.path.lexists(node.store.path):
            os.stat(f"{node.store.path}/.")  # one that may not be entered is a broken node
        vars(self).update(vars(read_node_view(node, self.boottime)))
        self.foreign: frozenset[str] = frozenset()
        settings = node.settings
        self.use: SampleView = read_sample_view(
            settings.exporter_dir, self.boottime, node.boot_id, settings.max_sample_age
        )
        for device in self.devices:  # as the exporter shows it, too
            if self.use.sample and device.bus in self.use.sample.lost:
                device.fault = device.fault or self.use.sample.lost[device.bus][1]

    def rows(self) -> list[states.DeviceState]:
        """Return one row a device."""
        settings = self.node.settings
        foreign = self.foreign | self.use.foreign_ids()
        idle = self.use.idle_ids(self.held, settings.idle_after)
        return states.device_states(self.devices, self, settings.expected_gpus, foreign, idle)

    def row_of_lock(self, row: states.DeviceState, lock: Lock) -> states.DeviceState:
        """Return the row of a device as it is for one of those that hold it."""
        if row.device is None or not row.others:
            return row
        state, why = states.classify_device(row.device, lock, self.quarantined or {}, self.verdicts)
        if state == states.HELD and self.use.idle_ids(
            {lock.id: lock}, self.node.settings.idle_after
        ):
            state = states.HELD_IDLE
        own = states.DeviceState(row.id, row.device, lock, state, why)
        own.noted, own.orphans = row.noted, self.find_orphans(lock)
        return own


class ProcessView:
    """One look at all processes of the node: who runs, and who has which device open."""

    def __init__(self, view: StatusView) -> None:
        self.view = view
        members: dict[str, ClaimMembership] = {}
        if any(lock.owner and lock.owner.scheduler == "slurm" for lock in view.held.values()):
            from gpulock.slurm.steps import is_slurm_job_process

            members["slurm"] = is_slurm_job_process
        self.scan = ProcessScan(view.node.proc, members)
        self.holders = OpenFiles(self.scan, view.devices, view.node.settings)

    def find_foreign_pids(self, device: str) -> list[int]:
        """Return who has a device open and is of no claim."""
        services = self.view.node.settings.allowed_processes
        pids = self.holders.pids_with_open(device)
        return find_foreign_pids(pids, self.view.held, self.scan, services)

    def judge(self) -> None:
        """Fill in verdicts and foreign processes of the view, changing nothing.

        Of Slurm's jobs only those without a fresh verdict: they may need slurmctld's word, and
        nobody who looks waits for it twice.
        """
        view, held, known = self.view, self.view.held, self.view.verdicts or {}
        view.verdicts = dict(known)
        if held:  # the judge's modules cost a third of what status does
            from gpulock.alloc import reaper
            from gpulock.schedulers.liveness import make_liveness_judge

            judge_now = make_liveness_judge(view.node)
            self.scan = self.holders.scan = judge_now.scan
            asked = [
                lock
                for lock in held.values()
                if lock.owner
                and not (lock.owner.scheduler == "slurm" and lock.owner.token in known)
            ]
            engine = reaper.Reaper(view.node, judge_now, (), held)
            engine.files = self.holders
            for one in engine.decide(asked):
                view.verdicts[reaper.claim_key(one.lock)] = one.verdict
        ids = [device.id for device in view.devices]
        free = [one for one in ids if not any(lock_ids_overlap(name, one) for name in held)]
        view.foreign = frozenset([name for name in free if self.find_foreign_pids(name)])


def group_by_claim(locks: Iterable[Lock]) -> list[list[Lock]]:
    """Return the locks of each claim, in order; what cannot be read stands alone.

    Several places of a shared GPU may be one claim's.
    """
    claims: dict[str, list[Lock]] = {}
    for lock in locks:
        claims.setdefault(lock.owner.token if lock.owner else lock.id, []).append(lock)
    return list(claims.values())


def view_node(node: Node, judging: bool) -> StatusView:
    """Return what can be seen; with `judging`, by a look in place as well."""
    view = StatusView(node)
    if judging:
        ProcessView(view).judge()
    return view
