# SPDX-License-Identifier: Apache-2.0
"""A nvidia-smi that asks whatever NVML there is: for tests of `make gpu-check` on the double.

It knows a field of each kind that the check compares. FAKE_SMI_PLANT plants a difference,
`FIELD=VALUE` with commas between: `temperature.gpu=+9` adds, `name=Other` replaces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pynvml as typed

p: Any = typed  # the stubs know what the exporter needs, which is less
MIB = 1 << 20
ENABLED = ("Disabled", "Enabled")


def field(handle: Any, number: int) -> int:
    """Return a field value; raise NVMLError where there is none."""
    value = p.nvmlDeviceGetFieldValues(handle, [(number, 0)])[0]
    if value.nvmlReturn:
        raise p.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal)


def memory(handle: Any, name: str) -> int:
    """Return memory in MiB."""
    return int(getattr(p.nvmlDeviceGetMemoryInfo(handle, p.nvmlMemory_v2), name)) // MIB


FIELDS: dict[str, Callable[[Any], object]] = {
    "index": p.nvmlDeviceGetIndex,
    "uuid": p.nvmlDeviceGetUUID,
    "name": p.nvmlDeviceGetName,
    "pci.bus_id": lambda h: p.nvmlDeviceGetPciInfo(h).busId,
    "driver_version": lambda _: p.nvmlSystemGetDriverVersion(),
    "persistence_mode": lambda h: ENABLED[p.nvmlDeviceGetPersistenceMode(h)],
    "mig.mode.current": lambda h: ENABLED[p.nvmlDeviceGetMigMode(h)[0]],
    "utilization.gpu": lambda h: p.nvmlDeviceGetUtilizationRates(h).gpu,
    "memory.total": lambda h: memory(h, "total"),
    "memory.used": lambda h: memory(h, "used"),
    "power.draw.instant": lambda h: f"{field(h, 186) / 1000:.2f}",
    "power.draw": lambda h: f"{p.nvmlDeviceGetPowerUsage(h) / 1000:.2f}",
    "fan.speed": p.nvmlDeviceGetFanSpeed,
    "temperature.gpu": lambda h: p.nvmlDeviceGetTemperature(h, 0),
    "clocks.sm": lambda h: p.nvmlDeviceGetClockInfo(h, p.NVML_CLOCK_SM),
    "clocks.mem": lambda h: p.nvmlDeviceGetClockInfo(h, p.NVML_CLOCK_MEM),
    "clocks_event_reasons.active": lambda h: (
        f"0x{p.nvmlDeviceGetCurrentClocksThrottleReasons(h):016X}"
    ),
    "ecc.errors.corrected.volatile.dram": lambda h: p.nvmlDeviceGetMemoryErrorCounter(h, 0, 0, 2),
    "ecc.errors.corrected.volatile.l1_cache": lambda h: p.nvmlDeviceGetMemoryErrorCounter(
        h, 0, 0, 0
    ),
    "gpu_recovery_action": lambda h: ("None", "Reset", "Reboot")[field(h, 230)],
}


def answer(name: str, handle: Any) -> str:
    """Return one value as nvidia-smi writes it, with what is planted in it."""
    try:
        value = str(FIELDS[name](handle))
    except p.NVMLError:
        return "[N/A]"
    for entry in filter(None, os.environ.get("FAKE_SMI_PLANT", "").split(",")):
        where, _, change = entry.partition("=")
        if where == name:
            value = f"{float(value) + float(change):g}" if change[:1] in "+-" else change
    return value


def reply(question: str, wanted: str) -> str:
    """Return the answer to a question; raise KeyError for one that it does not know."""
    handles = [p.nvmlDeviceGetHandleByIndex(n) for n in range(p.nvmlDeviceGetCount())]
    if question == "--help-query-gpu":
        shown = [name.replace("clocks.", 'clocks.current.X" or "clocks.') for name in FIELDS]
        return "".join(f'"{name}"\nA field.\n\n' for name in shown)
    if question == "--query-gpu":
        columns = wanted.split(",")
        if unknown := [name for name in columns if name not in FIELDS]:
            sys.exit(f'Field "{unknown[0]}" is not a valid field to query.')
        return "".join(f"{', '.join(answer(name, h) for name in columns)}\n" for h in handles)
    uuids = "".join(f"<uuid>{p.nvmlDeviceGetUUID(h)}</uuid>" for h in handles)
    return {"-q": f"<serial>1562</serial>{uuids}\n"}[question]


if __name__ == "__main__":
    p.nvmlInit()
    try:
        sys.stdout.write(reply(*sys.argv[1].partition("=")[::2]))
    finally:
        p.nvmlShutdown()
