# SPDX-License-Identifier: Apache-2.0
"""Compare what gpulock relies on with a real driver: a part of `make gpu-check`.

gpulock reads the devices from /proc/driver/nvidia and takes their order by bus id for the index
that NVML, nvidia-smi and CUDA (CUDA_DEVICE_ORDER=PCI_BUS_ID) use. Here /proc, NVML and nvidia-smi
are asked, and must agree. Alone (`check_devices.py`) it takes a second and needs no load.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import pynvml  # noqa: E402 (the checkout is put on the path first)

from tests.gpu.smi import Smi, SmiError  # noqa: E402

DRIVER = Path("/proc/driver/nvidia")
UNKNOWN = "?"  # the driver writes GPU-????????-... until the card is first used


class Device(NamedTuple):
    """One GPU, as one source tells it; the index is its place in that source's list."""

    bus_id: str
    uuid: str
    minor: int


def normal_bus_id(bus_id: str) -> str:
    """Write a bus id as the kernel does: NVML says 00000000:3B:00.0, /proc says 0000:3b:00.0."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def parse_information(text: str) -> Device:
    """Read one `information` file of the driver."""
    fields = {
        key.strip(): value.strip()
        for key, colon, value in (line.partition(":") for line in text.splitlines())
        if colon
    }
    return Device(fields["Bus Location"], fields["GPU UUID"], int(fields["Device Minor"]))


def parse_list(text: str) -> list[str]:
    """Read the UUIDs of whole GPUs from `nvidia-smi -L`, in its order."""
    return [
        line.rpartition("(UUID: ")[2].rstrip(")")
        for line in text.splitlines()
        if line.startswith("GPU ")
    ]


def listed_by_driver(driver: Path = DRIVER) -> list[Path]:
    """Return the driver's files, one a card; none where there is no driver or no card."""
    return sorted((driver / "gpus").glob("*/information"))


def from_proc(driver: Path = DRIVER) -> list[Device]:
    """Read the devices as gpulock does, sorted by bus id."""
    return sorted(parse_information(path.read_text()) for path in listed_by_driver(driver))


def from_nvml() -> list[Device]:
    """Ask NVML for its devices, in its order; raise NVMLError."""
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            Device(
                normal_bus_id(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                pynvml.nvmlDeviceGetUUID(handle),
                pynvml.nvmlDeviceGetMinorNumber(handle),
            )
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def differences(proc: list[Device], nvml: list[Device], listed: list[str]) -> list[str]:
    """Say in words where the three sources differ."""
    found: list[str] = []
    if len(proc) != len(nvml):
        found.append(f"/proc has {len(proc)} GPUs, NVML has {len(nvml)}")
    for index, (ours, theirs) in enumerate(zip(proc, nvml)):
        for field, mine, other in zip(Device._fields, ours, theirs):
            if mine != other:
                found.append(f"GPU {index}: {field} is {mine} in /proc, {other} in NVML")
    if listed != [device.uuid for device in nvml]:
        found.append(f"nvidia-smi -L has another order than NVML: {' '.join(listed)}")
    return found


def compare(driver: Path, smi: Smi) -> list[str]:
    """Ask all three; return where they differ; raise SmiError."""
    try:
        nvml = from_nvml()  # first: /proc may know a UUID only once the card was initialised
    except pynvml.NVMLError as fault:
        return [f"NVML does not answer here: {fault}"]
    return differences(from_proc(driver), nvml, parse_list(smi.run("-L")))


def main() -> int:
    """Print a short report; 0 when all agree, 1 when not, 2 when there is no GPU to ask."""
    before = from_proc()
    if not before:
        print(f"gpu-check: no NVIDIA GPU here ({DRIVER}/gpus is missing or empty).")
        return 2
    try:
        found = compare(DRIVER, Smi())
    except SmiError as fault:
        print(f"gpu-check: {fault}")
        return 2
    print("index  bus id        minor  UUID")
    for index, device in enumerate(from_proc()):
        print(f"{index:5}  {device.bus_id:12}  {device.minor:5}  {device.uuid}")
    unknown = sum(UNKNOWN in device.uuid for device in before)
    print(f"{unknown} of {len(before)} UUIDs were not yet known to /proc before NVML was started")
    for line in found:
        print(f"DIFFERS  {line}")
    print("FAILED" if found else "/proc, NVML and nvidia-smi agree")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
