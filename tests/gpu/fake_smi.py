# SPDX-License-Identifier: Apache-2.0
"""A nvidia-smi that asks whatever NVML there is: for tests of `make gpu-check` on the double.

It knows the questions that the check asks. FAKE_SMI_PLANT plants a difference, `FIELD=VALUE` with
commas between: `temperature.gpu=+9` adds, `name=Other` replaces. FAKE_SMI_LACKS hides fields,
FAKE_SMI_MIG_MIB is added to what each MIG instance uses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pynvml as typed

pynvml: Any = typed  # the stubs know what the exporter needs, which is less
ABSENT = "[N/A]"
MIB = 1 << 20
MOST_INSTANCES = 7
ENABLED = {0: "Disabled", 1: "Enabled"}
ACTIONS = ("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset")
Ask = Callable[[Any], object]


def field(number: int, divisor: float = 1.0) -> Ask:
    """Return what asks for a field value; raise NVMLError where there is none."""

    def ask(handle: Any) -> object:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [(number, 0)])[0]
        if value.nvmlReturn:
            raise pynvml.NVMLError(value.nvmlReturn)
        members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
        found: float = getattr(value.value, members[int(value.valueType)])
        return int(found) if divisor == 1 else f"{found / divisor:.2f}"

    return ask


def milliwatts(ask: Ask) -> Ask:
    """Return what asks for a limit, in watts."""
    return lambda handle: f"{float(str(ask(handle))) / 1000:.2f}"


def ecc(kind: int, place: int) -> Ask:
    """Return what asks for errors since the driver was loaded."""
    return lambda handle: pynvml.nvmlDeviceGetMemoryErrorCounter(
        handle, kind, pynvml.NVML_VOLATILE_ECC, place
    )


def remapped(place: int, words: tuple[str, str] | None = None) -> Ask:
    """Return what asks for remapped rows."""

    def ask(handle: Any) -> object:
        found: int = pynvml.nvmlDeviceGetRemappedRows(handle)[place]
        return words[found] if words else found

    return ask


def memory(name: str) -> Ask:
    """Return what asks for memory in MiB."""
    return lambda handle: round(
        getattr(pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2), name) / MIB
    )


KINDS = {"corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "uncorrected": 1}
PLACES = {
    "dram": pynvml.NVML_MEMORY_LOCATION_DEVICE_MEMORY,
    "sram": pynvml.NVML_MEMORY_LOCATION_SRAM,
    "l1_cache": pynvml.NVML_MEMORY_LOCATION_L1_CACHE,
    "l2_cache": pynvml.NVML_MEMORY_LOCATION_L2_CACHE,
    "register_file": pynvml.NVML_MEMORY_LOCATION_REGISTER_FILE,
    "texture_memory": pynvml.NVML_MEMORY_LOCATION_TEXTURE_MEMORY,
}
FIELDS: dict[str, Ask] = {
    "index": pynvml.nvmlDeviceGetIndex,
    "uuid": pynvml.nvmlDeviceGetUUID,
    "name": pynvml.nvmlDeviceGetName,
    "pci.bus_id": lambda handle: pynvml.nvmlDeviceGetPciInfo(handle).busId,
    "driver_version": lambda _: pynvml.nvmlSystemGetDriverVersion(),
    "persistence_mode": lambda handle: ENABLED[pynvml.nvmlDeviceGetPersistenceMode(handle)],
    "mig.mode.current": lambda handle: ENABLED[pynvml.nvmlDeviceGetMigMode(handle)[0]],
    "utilization.gpu": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    "utilization.memory": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).memory,
    "memory.total": memory("total"),
    "memory.used": memory("used"),
    "power.draw.instant": field(186, 1000),
    "power.draw": lambda handle: f"{pynvml.nvmlDeviceGetPowerUsage(handle) / 1000:.2f}",
    "power.limit": milliwatts(pynvml.nvmlDeviceGetPowerManagementLimit),
    "enforced.power.limit": milliwatts(pynvml.nvmlDeviceGetEnforcedPowerLimit),
    "temperature.memory": field(82),
    "pcie.link.gen.max": pynvml.nvmlDeviceGetMaxPcieLinkGeneration,
    "pcie.link.width.current": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
    "pcie.link.width.max": pynvml.nvmlDeviceGetMaxPcieLinkWidth,
    "fan.speed": pynvml.nvmlDeviceGetFanSpeed,
    "temperature.gpu": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, 0),
    "clocks.sm": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    "clocks.mem": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
    "clocks_event_reasons.active": lambda handle: (
        f"0x{pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle):016X}"
    ),
    "clocks_event_reasons_counters.sw_power_cap": field(74, 1000),
    "remapped_rows.correctable": remapped(0),
    "remapped_rows.uncorrectable": remapped(1),
    "remapped_rows.pending": remapped(2, ("No", "Yes")),
    "remapped_rows.failure": remapped(3, ("No", "Yes")),
    "gpu_recovery_action": lambda handle: ACTIONS[int(str(field(230)(handle)))],
    **{
        f"ecc.errors.{kind}.volatile.{place}": ecc(number, where)
        for kind, number in KINDS.items()
        for place, where in PLACES.items()
    },
}


def answer(name: str, handle: Any) -> str:
    """Return one value as nvidia-smi writes it, with what is planted in it."""
    try:
        told = str(FIELDS[name](handle))
    except pynvml.NVMLError:
        return ABSENT
    planted = os.environ.get("FAKE_SMI_PLANT", "")
    for entry in filter(None, planted.split(",")):
        where, _, change = entry.partition("=")
        if where == name:
            told = f"{float(told) + float(change):g}" if change[:1] in "+-" else change
    return told


def handles() -> list[Any]:
    """Return all cards."""
    return [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]


def card_xml(handle: Any) -> str:
    """Return what the XML says of a card, as far as the check reads it."""
    parts: list[str] = []
    for place in range(MOST_INSTANCES):
        try:
            one = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except pynvml.NVMLError:
            continue
        used = int(answer("memory.used", one)) + int(os.environ.get("FAKE_SMI_MIG_MIB", "0"))
        parts.append(
            f"<mig_device><gpu_instance_id>{pynvml.nvmlDeviceGetGpuInstanceId(one)}"
            "</gpu_instance_id><compute_instance_id>"
            f"{pynvml.nvmlDeviceGetComputeInstanceId(one)}</compute_instance_id>"
            f"<fb_memory_usage><total>{answer('memory.total', one)} MiB</total>"
            f"<used>{used} MiB</used></fb_memory_usage></mig_device>"
        )
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    inside = f"<serial>1562</serial><uuid>{uuid}</uuid>"
    return f"<gpu>{inside}<mig_devices>{''.join(parts)}</mig_devices></gpu>"


def names() -> list[str]:
    """Return the fields that this nvidia-smi knows."""
    lacks = os.environ.get("FAKE_SMI_LACKS", "").split(",")
    return [name for name in FIELDS if name not in lacks]


def reply(words: list[str]) -> str:
    """Return the answer to a question; raise KeyError for one that it does not know."""
    question, _, wanted = words[0].partition("=")
    if question == "--help-query-gpu":
        other = ' or "gpu_uuid"'
        return "".join(f'"{name}"{other * (name == "uuid")}\nA field.\n\n' for name in names())
    if question == "--query-gpu":
        columns = wanted.split(",")
        if unknown := [name for name in columns if name not in names()]:
            sys.exit(f'Field "{unknown[0]}" is not a valid field to query.')
        rows = [", ".join(answer(name, handle) for name in columns) for handle in handles()]
        return "".join(f"{row}\n" for row in rows)
    if question == "--query-compute-apps":
        pairs = [
            (pynvml.nvmlDeviceGetUUID(handle), one.pid)
            for handle in handles()
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
        return "".join(f"{uuid}, {pid}\n" for uuid, pid in pairs)
    if question == "-L":
        return "".join(
            f"GPU {n}: {answer('name', handle)} (UUID: {pynvml.nvmlDeviceGetUUID(handle)})\n"
            for n, handle in enumerate(handles())
        )
    if question == "-q":
        return f"<nvidia_smi_log>{''.join(map(card_xml, handles()))}</nvidia_smi_log>\n"
    raise KeyError(question)


if __name__ == "__main__":
    pynvml.nvmlInit()
    try:
        sys.stdout.write(reply(sys.argv[1:]))
    finally:
        pynvml.nvmlShutdown()
