# SPDX-License-Identifier: Apache-2.0
"""What a real card answered, as lines of the NVML double's control file (tests/nvml/README.md).

Of what `raw` wrote down: each answer that the double has a key for, and each field value by its
number where it has none. A key that is not there is what the card does not support. Pure but for
the double's own table of fields, which is read where it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

FIELDS_C = Path(__file__).resolve().parents[1] / "nvml/fields.c"
_FIELD = re.compile(r'\{(\d+), \w+, (PLAIN|RAIL|LINK), "([\w.]+)"\}')
GET = "nvmlDeviceGet"
SIMPLE = {
    "name": "Name",
    "brand": "Brand",
    "architecture": "Architecture",
    "cores": "NumGpuCores",
    "vbios": "VbiosVersion",
    "bus_type": "BusType",
    "module_id": "ModuleId",
    "persistence": "PersistenceMode",
    "compute_mode": "ComputeMode",
    "display.mode": "DisplayMode",
    "display.active": "DisplayActive",
    "pstate": "PerformanceState",
    "inforom.image": "InforomImageVersion",
    "gsp.version": "GspFirmwareVersion",
    "memory.bus_width": "MemoryBusWidth",
    "power": "PowerUsage",
    "power.management": "PowerManagementMode",
    "power.source": "PowerSource",
    "power.limit": "PowerManagementLimit",
    "power.limit.default": "PowerManagementDefaultLimit",
    "power.limit.enforced": "EnforcedPowerLimit",
    "temperature": "Temperature(0)",
    "temperature.margin": "MarginTemperature",
    "clocks.reasons": "CurrentClocksEventReasons",
    "clocks.reasons.supported": "SupportedClocksEventReasons",
    "pcie.generation": "CurrPcieLinkGeneration",
    "pcie.generation.max": "MaxPcieLinkGeneration",
    "pcie.width": "CurrPcieLinkWidth",
    "pcie.width.max": "MaxPcieLinkWidth",
    "accounting": "AccountingMode",
    "accounting.buffer": "AccountingBufferSize",
    "events.supported": "SupportedEventTypes",
    "mig.max": "MaxMigDeviceCount",
    "nvlink.*.version": "NvLinkVersion(0)",
    **{
        f"clock.{most}{name}": f"{'Max' if most else ''}ClockInfo({number})"
        for most in ("", "max.")
        for number, name in enumerate(("graphics", "sm", "memory", "video"))
    },
    **{
        f"ecc.{counter}.{kind}.sram": f"MemoryErrorCounter({kind_number},{counter_number},7)"
        for kind_number, kind in enumerate(("corrected", "uncorrected"))
        for counter_number, counter in enumerate(("volatile", "aggregate"))
    },
}
PARTS: dict[str, tuple[str, int | str]] = {  # key: getter, and which part of what it answers
    "power.limit.min": ("PowerManagementLimitConstraints", 0),
    "power.limit.max": ("PowerManagementLimitConstraints", 1),
    "mig.mode": ("MigMode", 0),
    "mig.mode.pending": ("MigMode", 1),
    "gsp.mode": ("GspFirmwareMode", 0),
    "gsp.default": ("GspFirmwareMode", 1),
    "utilization.gpu": ("UtilizationRates", "gpu"),
    "utilization.memory": ("UtilizationRates", "memory"),
    "utilization.encoder": ("EncoderUtilization", 0),
    "utilization.decoder": ("DecoderUtilization", 0),
    "utilization.jpeg": ("JpgUtilization", 0),
    "utilization.ofa": ("OfaUtilization", 0),
    "bar1.total": ("BAR1MemoryInfo", "bar1Total"),
    "bar1.used": ("BAR1MemoryInfo", "bar1Used"),
}
MEMORY = {"memory.total": "total", "memory.used": "used", "memory.reserved": "reserved"}
MEMORY_V2 = re.compile(rf"{GET}MemoryInfo\(\d+\)")


def lines(text: str) -> str:
    """Return the lines for what `raw` printed, a comment where it printed nothing of use."""
    try:
        told = json.loads(text)
    except ValueError:
        return "# NVML could not be asked\n"
    table = own_fields(FIELDS_C.read_text())
    found = [f"driver.version={told['driver']}", f"devices={len(told['cards'])}"]
    for number, card in enumerate(told["cards"]):
        found += [f"gpu{number}.{key}={value}" for key, value in keys(card, table).items()]
    return "\n".join(found) + "\n"


def own_fields(text: str) -> dict[str, str]:
    """Return the keys of the double's own field values, those of links left out."""
    return {number: key for number, scope, key in _FIELD.findall(text) if scope != "LINK"}


def keys(card: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of one card."""
    answers: Mapping[str, Any] = card["answers"]
    found = dict(fields(card["fields"], table))
    for key, getter in SIMPLE.items():
        put(found, key, answers.get(GET + getter))
    for key, (getter, part) in PARTS.items():
        put(found, key, piece(answers.get(GET + getter), part))
    memory = next((value for name, value in answers.items() if MEMORY_V2.fullmatch(name)), None)
    for key, part in MEMORY.items():
        put(found, key, piece(memory, part))
    capability = answers.get(f"{GET}CudaComputeCapability")
    if isinstance(capability, list):
        found["cuda.capability"] = f"{piece(capability, 0)}.{piece(capability, 1)}"
    samples = card["samples"]
    if samples.get("shortest_us"):
        put(found, "samples.period", samples["shortest_us"])
        put(found, "samples.count", samples["count"])
    return found


def fields(told: Mapping[str, Any], table: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the field values that there are, by the double's own key where it has one."""
    for number, value in told.items():
        if isinstance(value, list):
            yield table.get(number, f"field.{number}"), str(piece(value, 1))


def piece(value: Any, part: int | str) -> Any:
    """Return a part of an answer, None of one that is an error."""
    if isinstance(part, str):
        return cast("dict[str, Any]", value)[part] if isinstance(value, dict) else None
    items: Any = value
    return items[part] if isinstance(value, list) else None


def put(found: dict[str, str], key: str, value: Any) -> None:
    """Put a value in unless it is an error."""
    if value is not None and not str(value).startswith(("error ", "binding: ")):
        found[key] = str(value)
