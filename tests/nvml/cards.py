# SPDX-License-Identifier: Apache-2.0
"""What real cards answer when idle, as keys of the double's control file, by which driver.

A key that is not here is what the card does not support. Sources: `nvidia-smi -q` of these cards
as people published it: H200 (driver 590) and RTX 4080 SUPER (595) in the captures of
utkuozdemir/nvidia_gpu_exporter; K80 and V100 in NVIDIA/nvidia-docker issues 809, 1226, 914 and
1076; A100 in NVIDIA's data sheets and MIG user guide. The RTX 4090 is the 4080 SUPER with the
memory, clocks and limits of its data sheet.

With which release branch of the driver a function first came was found by comparing the headers of
CUDA 11.0 to 13.3, as go-nvml's history has them, and the branch that each CUDA came with. What came
with MIG (450) is that of CUDA 11.0 which serves MIG and A100.

And the keys of a simulated node, so that /proc, /sys and NVML agree: what the node's files tell is
taken from there (bus ids, UUIDs, minors, models, MIG, NVLinks, NUMA nodes, the driver's version).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from gpulock.node.device_list import INVENTORY_LINE, read_devices
from gpulock.node.devices import Device
from gpulock.store import kv

_EVERY = {
    "persistence": "1",
    "processes": "none",
    "utilization.gpu": "0",
    "utilization.memory": "0",
    "memory.used": "0",
    "clocks.reasons": "1",
    "pcie.generation.max": "3",
    "pcie.generation": "3",
    "pcie.width.max": "16",
    "pcie.width": "16",
    "pcie.replays": "0",
}
_NVLINK_ERRORS = {
    f"nvlink.errors.{kind}": "0" for kind in ("crc_flit", "crc_data", "replay", "recovery")
}
_VIOLATIONS = {
    f"violation.{name}": "0"
    for name in ("power", "thermal", "sync_boost", "board_limit", "reliability")
}
_MODERN = {**_EVERY, **_VIOLATIONS}


def _ecc(*locations: str) -> dict[str, str]:
    kinds = ("corrected", "uncorrected")
    return {f"ecc.volatile.{kind}.{place}": "0" for kind in kinds for place in locations}


_OLD_ECC = _ecc("dram", "register", "l1", "l2", "texture")
_NEW_ECC = {
    **_ecc("dram", "sram"),
    **{f"remapped.{name}": "0" for name in ("correctable", "uncorrectable", "pending", "failure")},
}


def _power(draw: int, limit: int) -> dict[str, str]:
    """Return the keys of power, from watts."""
    same = dict.fromkeys(("power.limit", "power.limit.enforced"), limit)
    watts = {**same, **dict.fromkeys(("power", "power.instant"), draw)}
    return {key: str(1000 * value) for key, value in watts.items()}


def _clocks(chip: int, memory: int) -> dict[str, str]:
    """Return the keys of clocks, in MHz."""
    return {"clock.graphics": str(chip), "clock.sm": str(chip), "clock.memory": str(memory)}


_MIG = {"mig.mode": "0", "mig.mode.pending": "0", "mig.max": "7"}
_K80 = {
    **_EVERY,
    **_OLD_ECC,
    **_power(30, 149),
    **_clocks(324, 324),
    **{"temperature": "36", "pci.device_id": "0x102D10DE"},
}
_V100 = {
    **_EVERY,
    **_VIOLATIONS,
    **_OLD_ECC,
    **_power(43, 300),
    **_clocks(135, 877),
    **{"temperature": "34", "temperature.memory": "33", "memory.reserved": "270M"},
    **{"ecc.volatile.uncorrected.cbu": "0", "pci.device_id": "0x1DB510DE"},
    **_NVLINK_ERRORS,
    **{"nvlink.count": "6", "nvlink.*.state": "1"},
}
_A100 = {
    **_MODERN,
    **_NEW_ECC,
    **_power(62, 400),
    **_clocks(210, 1593),
    **{"temperature": "31", "temperature.memory": "42", "memory.reserved": "634M"},
    **{"pci.device_id": "0x20B210DE", "pcie.generation.max": "4", "pcie.generation": "4"},
    **_MIG,
    **_NVLINK_ERRORS,
    **{"nvlink.count": "12", "nvlink.*.state": "1"},
}
_H200 = {
    **_MODERN,
    **_NEW_ECC,
    **_power(77, 700),
    **_clocks(345, 3201),
    **{"power": "77670", "power.instant": "77880", "memory.reserved": "614M"},
    **{"temperature": "28", "temperature.memory": "32", "pci.device_id": "0x233510DE"},
    **{"pcie.generation.max": "5", "pcie.generation": "5"},
    **_MIG,
    **_NVLINK_ERRORS,
    **{"nvlink.count": "18", "nvlink.*.state": "1"},
    **{"gpm": "1", **{f"gpm.{n}": "0" for n in (*range(1, 14), 20, 21, 60, 61)}},
}
_RTX_4090 = {
    **_MODERN,
    **_power(26, 450),
    **_clocks(210, 405),
    **{"persistence": "0", "fan.0": "0", "temperature": "43", "memory.reserved": "480M"},
    **{"pci.device_id": "0x268410DE", "pcie.generation.max": "4", "pcie.generation": "1"},
}

CARDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Tesla K80": _K80,
        "Tesla V100-SXM2-32GB": _V100,
        "NVIDIA A100-SXM4-80GB": _A100,
        "NVIDIA H200": _H200,
        "NVIDIA GeForce RTX 4090": _RTX_4090,
    }
)

# Keys that only the library of this branch and newer answers (CUDA's headers, see drivers.py).
NEWER_KEYS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        535: ("power.instant",),
        555: ("pcie.tx_bytes", "pcie.rx_bytes"),
        570: ("recovery_action",),
        575: ("violation.sw_thermal", "violation.hw_thermal", "violation.hw_power_brake"),
    }
)
WITHOUT_COUNTERS = ("Tesla K80",)  # no energy, no bytes over PCIe: those came with Volta


_FIRST = {
    450: """DeviceGetComputeInstanceId DeviceGetGpuInstanceId DeviceGetMaxMigDeviceCount
        DeviceGetMigDeviceHandleByIndex DeviceGetMigMode""",
    455: "DeviceGetComputeRunningProcesses_v2 DeviceGetGraphicsRunningProcesses_v2",
    470: """DeviceGetMPSComputeRunningProcesses DeviceGetMPSComputeRunningProcesses_v2
        DeviceGetNvLinkRemoteDeviceType""",
    510: """DeviceGetComputeRunningProcesses_v3 DeviceGetGraphicsRunningProcesses_v3
        DeviceGetMPSComputeRunningProcesses_v3 DeviceGetMemoryInfo_v2""",
    520: "GpmMetricsGet GpmQueryDeviceSupport GpmSampleAlloc GpmSampleFree GpmSampleGet",
    525: "DeviceGetGpuFabricInfo GpmMigSampleGet",
    535: "DeviceGetCurrentClocksEventReasons DeviceGetRunningProcessDetailList",
    550: "DeviceGetGpuFabricInfoV DeviceGetNumaNodeId",
    570: "DeviceGetTemperatureV",
    580: "DeviceGetAddressingMode",
}

FIRST_BRANCH: Mapping[str, int] = MappingProxyType(
    {f"nvml{name}": branch for branch, names in _FIRST.items() for name in names.split()}
)

# CUDA 12.2.0 and 12.2.1 (535.54, 535.86): entries of 32 bytes, and no other list that has them.
DETAILS = "nvmlDeviceGetRunningProcessDetailList"
WIDE_BRANCH, WIDE_UNTIL = 535, 99


def missing_from(driver: str) -> frozenset[str]:
    """Return the functions that the library of a driver like `535.129.03` does not have."""
    branch = int(driver.partition(".")[0])
    missing = frozenset(name for name, first in FIRST_BRANCH.items() if first > branch)
    return missing | {DETAILS} if has_wide_entries(driver) else missing


def has_wide_entries(driver: str) -> bool:
    """Return whether version 3 of the process lists has entries of 32 bytes with this driver."""
    branch, release = (int(part) for part in driver.split(".")[:2])
    return branch == WIDE_BRANCH and release < WIDE_UNTIL


Keys = dict[str, str]

ENERGY = 7_000_000  # mJ: what a card may have taken in the first seconds after a boot

_CUDA = {390: 9010, 418: 10010, 535: 12020, 570: 12080, 590: 13010}


def driver_version(folder: Path) -> str:
    """Return the release that the node's /proc/driver/nvidia/version names."""
    words = (folder / "proc/driver/nvidia/version").read_text().split()
    return next(word for word in words if word[0].isdigit() and "." in word)


def node_keys(folder: Path, driver: str) -> Keys:
    """Return all keys of the node in `folder` as the library of `driver` would answer."""
    devices = read_devices(f"{folder}/proc/driver/nvidia", f"{folder}/sys")
    inventory = kv.decode_pairs((folder / "run/gpulock/inventory").read_text(), INVENTORY_LINE)
    branch = int(driver.partition(".")[0])
    cuda = max(cuda for first, cuda in _CUDA.items() if first <= branch)
    keys = {
        "devices": str(len(devices)),
        "driver.version": driver,
        "nvml.version": f"{cuda // 1000}.{driver}",
        "processes.wide": str(int(has_wide_entries(driver))),
    }
    for device in devices:
        own = _card(device, branch) | {"pci.bus_id": device.bus}
        own |= _inventory(device, inventory, devices)
        keys |= {f"gpu{device.index}.{key}": value for key, value in own.items()}
    return keys


def _card(device: Device, branch: int) -> Keys:
    """Return what the model is like, without what this driver is too old for."""
    keys = dict(CARDS[device.model])
    keys |= {"name": device.model, "minor": str(device.minor), "uuid": device.uuid}
    if device.model not in WITHOUT_COUNTERS:
        now = time.time_ns() // 1000
        keys["energy"] = f"{ENERGY + 1000 * device.index}+{keys['power']}/s@{now}"
        keys |= {"pcie.tx_bytes": f"1000000+379904/s@{now}"}
        keys |= {"pcie.rx_bytes": f"2000000+345088/s@{now}"}
        keys |= {
            f"violation.{name}": "0" for name in ("sw_thermal", "hw_thermal", "hw_power_brake")
        }
        keys["recovery_action"] = "0"
    for first, names in NEWER_KEYS.items():
        if branch < first:
            keys = {key: value for key, value in keys.items() if key not in names}
    return keys


def _inventory(device: Device, inventory: Keys, devices: list[Device]) -> Keys:
    """Return what only NVML can tell: memory, UUIDs before the first use, MIG, NVLinks."""
    of = f"gpu.{device.bus}."
    keys = {"memory.total": f"{inventory[f'{of}memory_mib']}M", "uuid": inventory[f"{of}uuid"]}
    if inventory[f"{of}mig"] == "1":
        keys |= {"mig.mode": "1", "mig.mode.pending": "1"}
        start = f"mig.{device.bus}."
        names = [
            k[len(start) : -5] for k in inventory if k.startswith(start) and k.endswith(".uuid")
        ]
        names.sort(key=lambda name: [int(part.lstrip("gic")) for part in name.split(".")])
        for number, name in enumerate(names):
            own = instance_keys(
                device.model, name, {k: inventory[f"{start}{name}.{k}"] for k in _TOLD}
            )
            keys |= {f"mig{number}.{key}": value for key, value in own.items()}
    if inventory.get(f"{of}nvswitch") == "1":
        keys["nvlink.*.remote.type"] = "2"
    link = 0
    for other in devices:
        pair = sorted((device.bus, other.bus))
        for _ in range(int(inventory.get(f"link.{pair[0]}.{pair[1]}", "0"))):
            keys[f"nvlink.{link}.remote.bus_id"] = other.bus
            keys[f"nvlink.{link}.remote.type"] = "0"
            link += 1
    return keys


_TOLD = ("uuid", "profile", "memory_mib")


def instance_keys(model: str, name: str, told: Keys) -> Keys:
    """Return the keys of a MIG device: `gi1.ci0`, profile `3g.40gb`."""
    gi, ci = (part.lstrip("gic") for part in name.split("."))
    return {
        "uuid": told["uuid"],
        "name": f"{model} MIG {told['profile']}",
        "gi": gi,
        "ci": ci,
        "memory.total": f"{told['memory_mib']}M",
        "memory.used": "0",
        "ecc.volatile.uncorrected.sram": "0",
        "gpm.1": "0",
        "gpm.2": "0",
    }
