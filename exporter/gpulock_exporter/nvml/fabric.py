# SPDX-License-Identifier: Apache-2.0
"""Whether a card has joined the NVLink fabric of its node, and is well in it.

Only the worker imports this. The structures are those of nvml.h, for nvidia-ml-py names only those
that it knows.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import pynvml

from gpulock_exporter.nvml.named_calls import call_nvml, calls

FABRIC_DONE = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
FABRIC_FAILED, FABRIC_UNHEALTHY = 4, 5  # ours: done with an error, and done but not well
FABRIC = struct.Struct("@I16sIIB3xIB3x")  # nvmlGpuFabricInfo_v3_t; version 2 ends with the mask
FABRIC_SIZES = {3: FABRIC.size, 2: FABRIC.size - 4}
SUMMARY_UNHEALTHY = 2  # NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY
MASK_FLAGS, FLAG_TRUE = (0, 2, 4, 6), 1  # of the health mask: two bits for each fault, 1: it is so
MASK_CONFIGURATION, CONFIGURATION_GOOD = 8, 1  # four bits: 0 not supported, 1 none is wrong
FABRIC_BYTE = 0xFF  # nvml.h has one byte for the state, the binding four


def read_fabric_state(handle: pynvml.c_nvmlDevice_t) -> int:
    """Return how far a card is registered with the NVLink fabric: 0: there is none.

    Without it CUDA finds no card on a node with NVSwitch (Hopper and later).
    """
    found = pynvml.c_nvmlGpuFabricInfo_t()
    calls.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(found))  # 525
    state = found.state & FABRIC_BYTE
    return FABRIC_FAILED if state == FABRIC_DONE and found.status else state


def fabric_health_query(version: int, size: int) -> Callable[[pynvml.c_nvmlDevice_t], int]:
    """Return the call that also tells whether a card is well in the fabric; 550."""

    def read(handle: pynvml.c_nvmlDevice_t) -> int:
        raw = ctypes.create_string_buffer(FABRIC.size)
        struct.pack_into("@I", raw, 0, size | version << 24)
        call_nvml("nvmlDeviceGetGpuFabricInfoV", handle, raw)
        _, _, status, _, state, mask, summary = FABRIC.unpack(raw.raw)
        if state != FABRIC_DONE:
            return int(state)
        if status:
            return FABRIC_FAILED
        bad = summary == SUMMARY_UNHEALTHY or is_fabric_mask_bad(mask)
        return FABRIC_UNHEALTHY if bad else FABRIC_DONE

    return read


def is_fabric_mask_bad(mask: int) -> bool:
    """Return whether a health mask names a fault. Pure."""
    flags = any(mask >> shift & 3 == FLAG_TRUE for shift in MASK_FLAGS)
    return flags or mask >> MASK_CONFIGURATION & 15 > CONFIGURATION_GOOD


FABRIC_CALLS = (*(fabric_health_query(*one) for one in FABRIC_SIZES.items()), read_fabric_state)
