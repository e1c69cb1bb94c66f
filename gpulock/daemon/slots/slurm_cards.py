# SPDX-License-Identifier: Apache-2.0
"""Whether the map of Slurm's positions names the cards that are here: reported, never changed.

A card that is bad for a while (a quarantine, a stale lock) is still here.
"""

from __future__ import annotations

from typing import ClassVar

from gpulock.daemon.core.journal import DaemonJournal
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import TIME, Chore, Due
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.slurm import gres_map

EVERY = 600.0  # seconds between two comparisons


class SlurmCardComparison(Chore):
    """The chore that compares the map with the driver's cards."""

    after: ClassVar[Due] = {TIME: ()}

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self._next = 0.0

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Compare, where that is due, and log what is new."""
        if report.devices and now >= self._next:
            self._next = now + EVERY
            differences = compare_slurm_cards(node.settings, report.devices)
            self._journal.log_changes("slurm cards", differences)


def compare_slurm_cards(settings: Settings, devices: list[Device]) -> dict[str, str]:
    """Return what is wrong with the map, by a key; nothing on a node without one."""
    try:
        places = gres_map.map_positions(gres_map.read_map_pairs(settings.state_dir))
    except Refusal as refusal:
        missing = isinstance(refusal.__cause__, FileNotFoundError)
        return {} if missing else {"map": f"{refusal.why}; {refusal.do}"}
    here = {gres_map.gres_map_device_name(device) for device in devices if device.minor >= 0}
    known = set(places.values())
    differences = {
        place: f"Slurm counts /dev/nvidia{place}, which the driver does not show"
        for place in sorted(known - here)
    }
    for place in sorted(here - known):
        differences[place] = f"Slurm does not count /dev/nvidia{place}: see gres.conf"
    return differences
