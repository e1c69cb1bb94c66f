# SPDX-License-Identifier: Apache-2.0
"""The processes on a device: those that compute, those that draw, and those behind MPS.

Only the worker imports this. A list costs the driver milliseconds with its lock held, so they are
read only when asked for (docs/facts/nvml.md, cost). A list that is not whole is none: somebody's
process would be missing from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pynvml

from gpulock_exporter.nvml.answers import NvmlDevice, PollContext
from gpulock_exporter.telemetry import Process

Listing = Callable[[pynvml.c_nvmlDevice_t], list[pynvml.c_nvmlProcessInfo_t]]

MOST = 5000  # processes: more than that is garbage, and a frame has its limit
ATTEMPTS = 4  # a list may grow between the call for its length and the one for itself
KINDS = ("Compute", "Graphics", "MPSCompute")
VERSIONS = ("v3", "v2")  # 510; 450


def read_processes(
    device: NvmlDevice, look: PollContext, kinds: Iterable[str] = KINDS
) -> list[Process] | None:
    """Return the processes on a device, None where they are not known."""
    lists: list[list[Process]] = []
    for kind in kinds:
        ways = WAYS[kind]
        found = device.query(look, "processes", *ways)
        if found is not None:
            lists.append(found)
        elif not all(device.is_absent(look, way) for way in ways):
            return None  # it failed: what the others say is not all
    if sum(len(one) for one in lists) > MOST:
        look.fail("processes", device.name, f"more than {MOST} processes")
        return None
    return merge_process_lists(lists) if lists else None


def merge_process_lists(lists: Iterable[Iterable[Process]]) -> list[Process]:
    """Return each process once, with the most memory that any list gives it."""
    found: dict[int, Process] = {}
    for process in (one for some in lists for one in some):
        known = found.setdefault(process.pid, process)
        if (process.memory or 0) > (known.memory or 0):
            found[process.pid] = process
    return [found[pid] for pid in sorted(found)]


def _retrying_listing(name: str) -> Callable[[pynvml.c_nvmlDevice_t], list[Process]]:
    """Return a way to ask that asks again while the list outgrows the room that was made."""

    def ask(handle: pynvml.c_nvmlDevice_t) -> list[Process]:
        listing: Listing | None = getattr(pynvml, name, None)  # 12.535 has no v2
        if listing is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return [Process(one.pid, one.usedGpuMemory) for one in listing(handle)]
            except pynvml.NVMLError as fault:
                if fault.value != pynvml.NVML_ERROR_INSUFFICIENT_SIZE or attempt == ATTEMPTS:
                    raise
        return []

    return ask


WAYS = {
    kind: tuple(_retrying_listing(f"nvmlDeviceGet{kind}RunningProcesses_{v}") for v in VERSIONS)
    for kind in KINDS
}
