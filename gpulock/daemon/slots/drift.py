# SPDX-License-Identifier: Apache-2.0
"""Whether the scheduler counts the devices that are really here: told, never changed.

Grid Engine's count is qmaster's (`qconf -se`), asked for in a thread now and then, so that a
qmaster that does not answer holds up nobody. Of Slurm the node knows enough by itself: the map of
its positions. What is bad for a while (a quarantine, a stale lock) is the load sensor's to tell.
"""

from __future__ import annotations

from typing import ClassVar

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import DaemonJournal
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import TIME, Chore, Due
from gpulock.daemon.slots.rsmap import parse_complex_values
from gpulock.daemon.slots.sge import QmasterClient
from gpulock.daemon.slots.sge_host import choose_sge_host
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.kinds import SHARE_KIND
from gpulock.node.settings import Settings
from gpulock.sge.complexes import count_complex
from gpulock.slurm import gres_map

EVERY = 600.0  # seconds between two questions


class CountDrift(Chore):
    """The chore that compares counts."""

    after: ClassVar[Due] = {TIME: ()}

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self._next = 0.0
        self.asking: BackgroundCall[str] | None = None
        self._sge: dict[str, str] = {}

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Compare, where that is due; an answer of qmaster's is taken when it is there."""
        if not report.devices:
            return
        if self.asking is not None and self.asking.wait(0.0):
            asked, self.asking = self.asking, None  # an exception of its is raised once
            self._sge = find_sge_drift(asked, node.settings, report.devices)
        elif now < self._next:
            return
        if now >= self._next:
            self._next = now + EVERY
            if node.settings.sge_root and self.asking is None:
                settings, name = node.settings, node.name
                self.asking = BackgroundCall(lambda: ask_own_host(QmasterClient(settings), name))
        found = {**self._sge, **find_slurm_drift(node.settings, report.devices)}
        self._journal.log_changes("drift", found)


def ask_own_host(master: QmasterClient, node: str) -> str:
    """Return what qconf shows of this machine, nothing where it is no execution host.

    Raises Refusal.
    """
    hosts = master.ask("qconf", "-sel").split()
    try:
        alias = master.ask("gethostname", "-aname").strip()
    except Refusal:  # not every build has it
        alias = ""
    host = choose_sge_host(hosts, node, alias)
    return master.ask("qconf", "-se", host) if host else ""


def find_sge_drift(
    asking: BackgroundCall[str], settings: Settings, devices: list[Device]
) -> dict[str, str]:
    """Return what is wrong with qmaster's count, by a key; no answer is nothing to tell."""
    try:
        known = parse_complex_values(asking.answer())
    except (Refusal, OSError):
        return {}
    there = {name: count_complex(devices, settings, name) for name in settings.sge_complexes}
    return {
        f"sge {name}": f"Grid Engine counts {name}={known[name]} here, there are {count}"
        f" {'shares' if settings.sge_kinds.get(name) == SHARE_KIND else 'devices'};"
        f" see gpulock doctor"
        for name, count in there.items()
        if name in known and "(" not in known[name] and known[name] != str(count)
    }


def find_slurm_drift(settings: Settings, devices: list[Device]) -> dict[str, str]:
    """Return what is wrong with the map of Slurm's positions, by a key; none: no Slurm."""
    try:
        places = gres_map.map_positions(gres_map.read_map_pairs(settings.state_dir))
    except Refusal as refusal:
        missing = isinstance(refusal.__cause__, FileNotFoundError)
        return {} if missing else {"slurm map": f"{refusal.why}; {refusal.do}"}
    here = {gres_map.gres_map_device_name(device) for device in devices if device.minor >= 0}
    known = set(places.values())
    found: dict[str, str] = {}
    for place in sorted(known - here):
        found[f"slurm {place}"] = f"Slurm counts /dev/nvidia{place}, which the driver does not show"
    for place in sorted(here - known):
        found[f"slurm {place}"] = f"Slurm does not count /dev/nvidia{place}: see gres.conf"
    return found
