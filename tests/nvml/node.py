# SPDX-License-Identifier: Apache-2.0
"""The control file's lines for a simulated node, so that /proc, /sys and NVML agree.

What the node's files tell is taken from there (bus ids, UUIDs, minors, models, MIG, NVLinks, NUMA
nodes, the driver's version), and what the card is like from cards.py.
"""

from __future__ import annotations

import time
from pathlib import Path

from gpulock.node.device_list import INVENTORY_LINE, read_devices
from gpulock.node.devices import Device
from gpulock.store import kv
from tests.nvml.cards import CARDS, NEWER_KEYS, WITHOUT_COUNTERS, has_wide_entries

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
                device.model, name, {k: inventory[f"{start}{name}.{k}"] for k in _MIG}
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


_MIG = ("uuid", "profile", "memory_mib")


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
