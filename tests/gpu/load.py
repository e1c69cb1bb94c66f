# SPDX-License-Identifier: Apache-2.0
"""A load for one GPU that needs nothing but the driver: `load.py INDEX SHARE SECONDS`.

It writes a gibibyte of the card's memory over and over, by CUDA's driver API, for a share of the
time. It prints `running` once the first write is over, and ends by itself. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

PERIOD = 0.1  # seconds in which the share is kept
SIZE = 1 << 30


def main(index: int, share: float, seconds: float) -> str | None:
    """Load a card; return what its driver refused, None where nothing."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # libcuda reads it at cuInit
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as fault:
        return f"no CUDA driver here: {fault}"
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    size = ctypes.c_size_t(SIZE)

    def work() -> int:
        return int(cuda.cuMemsetD8_v2(memory, 1, size) or cuda.cuCtxSynchronize())

    begin = {
        "cuInit": lambda: cuda.cuInit(0),
        "cuDeviceGet": lambda: cuda.cuDeviceGet(ctypes.byref(device), index),
        "cuDevicePrimaryCtxRetain": lambda: cuda.cuDevicePrimaryCtxRetain(
            ctypes.byref(context), device
        ),
        "cuCtxSetCurrent": lambda: cuda.cuCtxSetCurrent(context),
        "cuMemAlloc": lambda: cuda.cuMemAlloc_v2(ctypes.byref(memory), size),
        "cuMemsetD8": work,
    }
    for name, call in begin.items():
        if error := call():
            return f"GPU {index}: {name}: error {error}"
    print("running", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        while time.monotonic() < began + share * PERIOD:
            if error := work():
                return f"GPU {index}: cuMemsetD8: error {error}"
        worked = time.monotonic() - began
        time.sleep(worked / share - worked)
    return None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
