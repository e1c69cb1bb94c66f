# SPDX-License-Identifier: Apache-2.0
"""The devices of this node: from the NVIDIA driver's /proc, the kernel's /sys, and NVML.

Hot, loaded by claims; asks no NVML, which can hang for seconds (docs/facts/nvml.md, hangs). The
order of the PCI bus ids is the NVML index and, with CUDA_DEVICE_ORDER=PCI_BUS_ID, CUDA's. The index
counts the driver's directories, so a card whose file is garbage keeps its place and no neighbour
moves; one that the driver excludes (NVreg_ExcludedGpus) has none.

MIG instances, memory and NVLink are known to NVML alone. The exporter asks it, gpulockd publishes
the answer in LOCK_DIR/inventory after a comparison with the driver; here it is advice.
"""

import os

from gpulock.errors import BROKEN, Refusal, one_line, os_error_kind
from gpulock.node.devices import Device, pci_bus_key
from gpulock.store import atomic, kv

UNKNOWN_UUID = "?"  # the driver shows GPU-????????-... until the card is first initialised
EXCLUDED = "the driver excludes it"
INVENTORY_LINE = "gpulock-inventory 1"
PAGE = 4096  # bytes; the driver writes about 700


def read_devices(driver_root: str, sys_root: str) -> list[Device]:
    """Return the node's devices by index; raise Refusal, BROKEN where no driver is loaded.

    A directory that vanishes while it is read is a card that is gone. A file that cannot be
    understood gives a device with a `fault`, which is never granted.
    """
    try:
        names = os.listdir(f"{driver_root}/gpus")
    except FileNotFoundError:
        raise Refusal(
            BROKEN, f"no NVIDIA driver: {driver_root}/gpus is missing", "load the driver"
        ) from None
    except OSError as fault:
        raise Refusal(
            os_error_kind(fault), f"{driver_root}/gpus: {fault}", "look at the driver"
        ) from fault
    devices: list[Device] = []
    index = 0
    for bus in sorted_bus_ids(names):
        device = Device(bus.lower(), index)
        try:
            read_card(f"{driver_root}/gpus/{bus}/information", device)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except (OSError, ValueError) as fault:
            device.fault = f"its information cannot be read: {fault}"
        read_pci_place(sys_root, device)
        devices.append(device)
        if device.fault == EXCLUDED:
            device.index = -1  # NVML and CUDA do not count it
        else:
            index += 1
    return devices


def sorted_bus_ids(names: list[str]) -> list[str]:
    """Return the names that are PCI bus ids, in bus order."""
    buses: list[tuple[tuple[int, int, int, int], str]] = []
    for name in names:
        try:
            buses.append((pci_bus_key(name), name))
        except ValueError:
            continue
    return [name for _, name in sorted(buses)]


def read_card(path: str, device: Device) -> None:
    """Fill in what a card's `information` file says; raise OSError, or ValueError for garbage."""
    data = atomic.read_head(path, PAGE)
    if len(data) == PAGE:
        raise ValueError(f"longer than {PAGE} bytes")
    text = "\n" + data.decode("utf-8", "surrogateescape")
    minor, place = information_value(text, "Device Minor"), information_value(text, "Bus Location")
    if not (minor.isascii() and minor.isdigit()):
        raise ValueError(f"Device Minor is {minor[:20]!r}")
    if place.lower() != device.bus:
        raise ValueError(f"Bus Location is {place[:20]!r}")
    uuid = information_value(text, "GPU UUID")
    if not uuid.isprintable() or "," in uuid:
        raise ValueError("GPU UUID is no UUID")
    device.minor = int(minor)
    device.uuid = uuid if uuid.startswith("GPU-") and UNKNOWN_UUID not in uuid else ""
    model = information_value(text, "Model")
    device.model = model if model.isprintable() else one_line(model)
    excluded = information_value(text, "GPU Excluded"), information_value(text, "Blacklisted")
    if "Yes" in excluded:
        device.fault = EXCLUDED


def read_pci_place(sys_root: str, device: Device) -> None:
    """Fill in NUMA node and PCI path; what sysfs does not tell is left unknown."""
    folder = f"{sys_root}/bus/pci/devices/{device.bus}"
    try:
        device.path = tuple([p for p in os.readlink(folder).split("/") if p != ".."][1:-1])
        device.numa = int(atomic.read_head(f"{folder}/numa_node", PAGE))
    except (OSError, ValueError):
        return


def information_value(text: str, name: str) -> str:
    """Return what stands behind the first line's `name:`, empty where there is none.

    `text` begins with a newline. Looked up, not split into all its lines: every claim reads every
    card.
    """
    begin = text.find(f"\n{name}:")
    if begin < 0:
        return ""
    begin += len(name) + 2
    end = text.find("\n", begin)
    return (text[begin:] if end < 0 else text[begin:end]).strip()


def read_nvml_inventory(lock_dir: str, boot_id: str) -> dict[str, str]:
    """Return what root published from NVML in this boot, or nothing.

    It is advice on MIG, memory and NVLink; that it is missing never stops a claim of whole GPUs.
    """
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{lock_dir}/inventory"), INVENTORY_LINE)
    except (OSError, kv.MalformedError):
        return {}
    return pairs if pairs.get("boot_id") == boot_id else {}


def apply_nvml_inventory(devices: list[Device], inventory: dict[str, str]) -> list[Device]:
    """Add what only NVML tells: a card in MIG mode gives way to its instances.

    Without an inventory it is granted whole. Without an instance it stays, and is withheld: the
    driver shows it, so it is not missing.
    """
    if not inventory:
        return devices
    result: list[Device] = []
    for device in devices:
        of = f"gpu.{device.bus}."
        device.uuid = device.uuid or inventory.get(f"{of}uuid", "")
        device.memory_mib = kv.int_or_zero(inventory.get(f"{of}memory_mib", ""))
        device.switched = inventory.get(f"{of}nvswitch") == "1"
        if inventory.get(f"{of}mig") == "1":
            parts = mig_instances(device, inventory)
            if not parts:
                device.withheld = True
            result.extend(parts or [device])
        else:
            result.append(device)
    return result


def mig_instances(parent: Device, inventory: dict[str, str]) -> list[Device]:
    """Return the MIG instances of a card that have a UUID, in order of their ids."""
    start = f"mig.{parent.bus}."
    instances: list[Device] = []
    names = [
        key[len(start) : -len(".uuid")]
        for key in inventory
        if key.startswith(start) and key.endswith(".uuid")
    ]
    for name in sorted(names, key=mig_instance_key):
        device = Device(f"{parent.bus}.{name}", parent.index)
        device.uuid = inventory[f"{start}{name}.uuid"]
        device.profile = inventory.get(f"{start}{name}.profile", "")
        device.memory_mib = kv.int_or_zero(inventory.get(f"{start}{name}.memory_mib", ""))
        device.minor, device.model = parent.minor, parent.model
        device.numa, device.path, device.fault = parent.numa, parent.path, parent.fault
        instances.append(device)
    return instances


def driver_mig_instances(driver_root: str, minor: int) -> frozenset[str]:
    """Return the instances of a card that the driver keeps access files of, as `gi1.ci0`."""
    folder = f"{driver_root}/capabilities/gpu{minor}/mig"
    return frozenset(
        [
            f"{gi}.{ci}"
            for gi in list_numbered_folders(folder, "gi")
            for ci in list_numbered_folders(f"{folder}/{gi}", "ci")
        ]
    )


def has_untold_instances(driver_root: str, devices: list[Device]) -> bool:
    """Return whether the driver shows MIG instances whose profile is not known."""
    known = {device.id for device in devices if device.profile}
    return any(
        [
            f"{device.bus}.{name}" not in known
            for device in {d.bus: d for d in devices}.values()
            for name in driver_mig_instances(driver_root, device.minor)
        ]
    )


def list_numbered_folders(folder: str, prefix: str) -> list[str]:
    """Return the folders `gi0`, `gi1`, ... in one, none where there is no such folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [name for name in names if name.startswith(prefix) and name[2:].isdecimal()]


def mig_instance_key(name: str) -> tuple[int, ...]:
    """Return the sort key of `gi10.ci0`: its numbers."""
    return tuple(
        [kv.int_or_zero("".join([c for c in part if c.isdigit()])) for part in name.split(".")]
    )


def nvlink_counts(inventory: dict[str, str]) -> dict[tuple[str, str], int]:
    """Return the number of NVLinks between each pair of bus ids, both ways round."""
    counts: dict[tuple[str, str], int] = {}
    for key, value in inventory.items():
        if key.startswith("link."):
            _, _, pair = key.partition(".")
            middle = len(pair) // 2  # two bus ids of one length with a dot between
            counts[pair[:middle], pair[middle + 1 :]] = kv.int_or_zero(value)
            counts[pair[middle + 1 :], pair[:middle]] = kv.int_or_zero(value)
    return counts
