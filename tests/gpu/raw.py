# SPDX-License-Identifier: Apache-2.0
"""What real cards answer to NVML, as JSON: the raw material of tests/nvml/cards.py.

Every getter of the library that needs nothing but the card, each field value by its number, and
what the driver's buffer of samples looks like: the last tells of which clock its time stamps are.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import time
from collections.abc import Iterator
from typing import Any, cast

import pynvml

FIELDS = 310  # nvml.h 13.3 has numbers up to 302
MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t
GETTER = "nvmlDeviceGet"
ALONE = frozenset({"handle", "device"})  # what the binding calls the card
TWO, FOUR = ((0,), (1,)), ((0,), (1,), (2,), (3,))  # enumerations of nvml.h
ARGUMENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "nvmlDeviceGetTemperature": ((0,),),
    "nvmlDeviceGetTemperatureThreshold": (*FOUR, (4,), (5,), (6,), (7,)),
    "nvmlDeviceGetClockInfo": FOUR,
    "nvmlDeviceGetMaxClockInfo": FOUR,
    "nvmlDeviceGetMemoryInfo": ((pynvml.nvmlMemory_v2,),),
    "nvmlDeviceGetPcieThroughput": TWO,
    "nvmlDeviceGetMemoryErrorCounter": tuple(
        (kind, counter, place) for kind in (0, 1) for counter in (0, 1) for place in range(8)
    ),
    "nvmlDeviceGetNvLinkState": tuple((link,) for link in range(18)),
    "nvmlDeviceGetNvLinkVersion": ((0,),),
    "nvmlDeviceGetNvLinkRemoteDeviceType": tuple((link,) for link in range(18)),
}
PRIVATE = ("UUID", "Serial", "Pdi", "Hostname", "Platform", "BoardPartNumber", "BoardId")


def plain(value: Any) -> Any:
    """Return an answer as JSON has it: structures by their fields, bytes as text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        names = [str(one[0]) for one in getattr(value, "_fields_", ())]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [plain(one) for one in value][:64]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (int, float, str, type(None))):
        return value
    return {name: plain(inner) for name, inner in vars(cast("object", value)).items()}


def getters() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield functions and what they need beside a card; none that tells which card it is."""
    for name in sorted(dir(pynvml)):
        if not name.startswith(GETTER) or any(word in name for word in PRIVATE):
            continue
        try:
            parameters = list(inspect.signature(getattr(pynvml, name)).parameters.values())
        except (TypeError, ValueError):
            continue
        needed = [one for one in parameters if one.default is inspect.Parameter.empty]
        if len(needed) == 1 and needed[0].name in ALONE:
            yield name, ()
        for arguments in ARGUMENTS.get(name, ()):
            yield name, arguments


def answers(handle: Any) -> dict[str, Any]:
    """Return what each getter answers, or `error N`; `nvmlDeviceGetClockInfo(1)`."""
    found: dict[str, Any] = {}
    for name, arguments in getters():
        called = f"{name}({','.join(str(one) for one in arguments)})" if arguments else name
        try:
            found[called] = plain(getattr(pynvml, name)(handle, *arguments))
        except pynvml.NVMLError as fault:
            found[called] = f"error {fault.value}"
        except Exception as fault:  # the fault of the binding with this driver
            found[called] = f"binding: {fault}"
    return found


def fields(handle: Any) -> dict[str, Any]:
    """Return each field value that there is as [type, number], each other one as its error."""
    found: dict[str, Any] = {}
    try:
        values = pynvml.nvmlDeviceGetFieldValues(handle, [(n, 0) for n in range(1, FIELDS + 1)])
    except pynvml.NVMLError as fault:
        return {"error": fault.value}
    for value in values:
        kind = value.valueType
        if value.nvmlReturn or kind >= len(MEMBERS):
            found[str(value.fieldId)] = f"error {value.nvmlReturn}"
        else:
            found[str(value.fieldId)] = [kind, plain(getattr(value.value, MEMBERS[kind]))]
    return found


def samples(handle: Any) -> dict[str, Any]:
    """Return the shape of the buffer of utilisation samples, beside the clocks of this machine."""
    try:
        kind = pynvml.NVML_GPU_UTILIZATION_SAMPLES
        value_type, found = pynvml.nvmlDeviceGetSamples(handle, kind, 0)
    except pynvml.NVMLError as fault:
        return {"error": fault.value}
    times = [one.timeStamp for one in found]
    steps = [later - sooner for sooner, later in zip(times, times[1:])]
    return {
        "type": value_type,
        "count": len(times),
        "shortest_us": min(steps, default=None),
        "longest_us": max(steps, default=None),
        "youngest_us": max(times, default=None),
        "epoch_us": time.time_ns() // 1000,
        "boottime_us": time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000,
        "monotonic_us": time.monotonic_ns() // 1000,
    }


def main() -> None:
    """Print it all."""
    pynvml.nvmlInit()
    try:
        cards: list[dict[str, Any]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            identity = {
                "bus_id": pynvml.nvmlDeviceGetPciInfo(handle).busId,
                "minor": pynvml.nvmlDeviceGetMinorNumber(handle),
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
            }
            parts = {"answers": answers(handle), "fields": fields(handle)}
            cards.append({"identity": identity, **parts, "samples": samples(handle)})
        dump = {"driver": plain(pynvml.nvmlSystemGetDriverVersion()), "cards": cards}
    finally:
        pynvml.nvmlShutdown()
    print(json.dumps(dump, indent=1))


if __name__ == "__main__":
    main()
