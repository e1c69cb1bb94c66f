# SPDX-License-Identifier: Apache-2.0
"""How many of the processes on a device are the lock owner's, a service's, or foreign.

NVML tells pids; /proc tells the rest, read as an ordinary user and only of those processes and
what is above them. What cannot be seen is not foreign: it is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpulock.alloc.process_owner import FOREIGN, GONE, UNSEEN, ProcessTree, classify_process
from gpulock.slurm.steps import is_slurm_job_process
from gpulock.store.locks import Lock
from gpulock_exporter.telemetry import Process


@dataclass(frozen=True)
class DeviceProcesses:
    """Who is on one device: how many processes NVML listed, and what they turned out to be.

    `at` is when it listed them, CLOCK_BOOTTIME seconds.
    """

    listed: int
    foreign: tuple[int, ...] = ()
    unseen: int = 0
    at: float | None = None


def classify_device_processes(
    listed: Sequence[Process], locks: Iterable[Lock], kin: ProcessTree, services: Sequence[str]
) -> DeviceProcesses:
    """Return who is on a device, `locks` being those on it, on its card or its instances."""
    holders, more = list(locks), {"slurm": is_slurm_job_process}
    judged = {one.pid: classify_process(one.pid, holders, kin, services, more) for one in listed}
    foreign = tuple(sorted(pid for pid, of in judged.items() if of == FOREIGN))
    found = list(judged.values())
    return DeviceProcesses(len(judged) - found.count(GONE), foreign, found.count(UNSEEN))
