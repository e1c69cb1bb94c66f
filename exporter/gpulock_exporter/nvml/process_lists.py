# SPDX-License-Identifier: Apache-2.0
"""Which processes are on a device, by lists whose layout is chosen as the driver's library shows.

Only the worker imports this. Drivers 535.43 to 535.98 put 32 bytes into each entry where all
others put 24 (docs/facts/nvml.md, process lists). nvidia-ml-py knows one of the two layouts, by its
own release: with the other driver it misses processes, and makes pids of other members. So the
entries are read here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Optional

import pynvml

from gpulock_exporter.nvml.answers import NOT_AVAILABLE, NvmlDevice, PollContext, call_nvml

MOST_PROCESSES = 5000  # processes: more than that is garbage, and a frame has its limit
ATTEMPTS = 5  # a list may grow before it is asked for again
ROOM, SPARE, MOST_ROOM = 64, 5, 2 * MOST_PROCESSES  # entries
KINDS = ("Compute", "Graphics", "MPSCompute")

FIRST = struct.Struct("@I4xQ")  # nvmlProcessInfo_v1_t: pid, bytes
SECOND = struct.Struct("@I4xQ8x")  # nvmlProcessInfo_t: also the instances
WIDE = struct.Struct("@I4xQ16x")  # the same of drivers 535.43 to 535.98: also protected memory

Listed = list[tuple[int, Optional[int]]]  # pid, and bytes where the driver tells them
Listing = Callable[[pynvml.c_nvmlDevice_t], Listed]


def read_processes(device: NvmlDevice, poll: PollContext) -> dict[int, int | None] | None:
    """Return the processes on a device: those that compute, that draw, and those behind MPS.

    None where they are not known: of a list that is not whole somebody's process would be missing.
    A list costs the driver milliseconds with its lock held (docs/facts/nvml.md, cost).
    """
    lists: list[Listed] = []
    for ways in WAYS.values():
        listed = device.query(poll, "processes", *ways)
        if listed is not None:
            lists.append(listed)
        elif not all(device.is_absent(poll, way) for way in ways):
            return None  # it failed: what the others say is not all
    if sum(len(one) for one in lists) > MOST_PROCESSES:
        poll.fail("processes", device.lock_id, f"more than {MOST_PROCESSES} processes")
        return None
    most: dict[int, int | None] = {}  # memory that any list gives it
    for pid, memory in (pair for one in lists for pair in one):
        known = most.get(pid)
        most[pid] = memory if known is None else max(known, memory or 0)
    return most if lists else None


def third_layout() -> struct.Struct:
    """Return the entry of version 3 of the call, of the driver whose library is loaded."""
    details = hasattr(pynvml.nvmlLib, "nvmlDeviceGetRunningProcessDetailList")
    memory = hasattr(pynvml.nvmlLib, "nvmlDeviceGetConfComputeMemSizeInfo")
    return WIDE if memory and not details else SECOND


def first_layout() -> struct.Struct:
    """Return the entry of the call that has no version; raise NVMLError where it is not known.

    Drivers with MIG but without version 2 of the call filled either of two layouts in.
    """
    if hasattr(pynvml.nvmlLib, "nvmlDeviceGetMigMode"):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    return FIRST


def _process_listing(name: str, choose: Callable[[], struct.Struct]) -> Listing:
    """Return a way to ask that asks again while the list outgrows the room that was made."""

    def ask(handle: pynvml.c_nvmlDevice_t) -> Listed:
        layout, room = choose(), ROOM
        for attempt in range(1, ATTEMPTS + 1):
            raw = ctypes.create_string_buffer(WIDE.size * room)  # enough for either layout
            count = ctypes.c_uint(room)
            try:
                call_nvml(name, handle, ctypes.byref(count), raw)
            except pynvml.NVMLError as fault:
                if fault.value != pynvml.NVML_ERROR_INSUFFICIENT_SIZE or attempt == ATTEMPTS:
                    raise
                room = min(2 * count.value + SPARE, MOST_ROOM)
            else:
                return read_process_entries(layout, raw, min(count.value, room))
        return []

    return ask


def read_process_entries(
    layout: struct.Struct, raw: ctypes.Array[ctypes.c_char], count: int
) -> Listed:
    """Return the first `count` processes of a list as it lies in memory."""
    return [
        (pid, None if memory in NOT_AVAILABLE else memory)
        for pid, memory in layout.iter_unpack(memoryview(raw)[: layout.size * count])
    ]


WAYS: dict[str, tuple[Listing, ...]] = {
    kind: (
        _process_listing(f"nvmlDeviceGet{kind}RunningProcesses_v3", third_layout),  # 510
        _process_listing(f"nvmlDeviceGet{kind}RunningProcesses_v2", lambda: SECOND),  # 455
        _process_listing(f"nvmlDeviceGet{kind}RunningProcesses", first_layout),
    )
    for kind in KINDS
}
