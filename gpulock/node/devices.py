# SPDX-License-Identifier: Apache-2.0
"""The devices of this node: from the NVIDIA driver's /proc, the kernel's /sys, and NVML.

Hot; asks no NVML, which can hang for seconds (docs/facts/nvml.md, hangs). The order of the PCI bus
ids is the NVML index and, with CUDA_DEVICE_ORDER=PCI_BUS_ID, CUDA's. The index counts the
driver's directories, so a card whose file is garbage keeps its place and no neighbour moves; one
that the driver excludes (NVreg_ExcludedGpus) has none.

MIG instances, memory and NVLink are known to NVML alone. The exporter asks it, gpulockd publishes
the answer in LOCK_DIR/inventory after a comparison with the driver; here it is advice.
"""

import os

from gpulock.errors import BROKEN, Refusal, one_line, os_error_kind
from gpulock.store import atomic, kv

MAJOR = 195  # /dev/nvidiaN, Documentation/admin-guide/devices.txt of the kernel
UNKNOWN_UUID = "?"  # the driver shows GPU-????????-... until the card is first initialised
EXCLUDED = "the driver excludes it"
BUS_PARTS = 3  # domain, bus, device.function
INVENTORY_LINE = "gpulock-inventory 1"
SHARE = ".share"  # in a lock id: a place on a card, which several owners hold at a time
PAGE = 4096  # bytes; the driver writes about 700


class Device:
    """A GPU, or an instance of one in MIG mode, that can be granted.

    `id` names the lock: PCI bus id, with `.gi<g>.ci<c>` for an instance, `.share<n>` for a place on
    a GPU that is shared. `parent` is the bus id of an instance's GPU, empty for a GPU and a share.
    `index` is the GPU's NVML index, `minor` the N of /dev/nvidiaN, `numa` -1 where the kernel does
    not know. `path` is the chain of PCI bridges from the root. `fault` says why it cannot be
    granted, by the driver; `withheld`: it is in MIG mode, and NVML's data has no instance of it.
    `places` is how many its card has, of a share that gpulock counts.
    """

    def __init__(self, name: str, index: int) -> None:
        self.id = name
        self.bus = card_bus_id(name)
        self.parent = self.bus if ".gi" in name else ""
        self.index = index
        self.minor = -1
        self.uuid = ""
        self.model = ""
        self.numa = -1
        self.path: tuple[str, ...] = ()
        self.memory_mib = 0
        self.places = 0
        self.profile = ""
        self.switched = False
        self.fault = ""
        self.withheld = False

    def label(self) -> str:
        """Return what names it among its neighbours: `0`, or `0:gi1.ci0`."""
        return f"{self.index}:{self.id[len(self.bus) + 1 :]}" if self.parent else str(self.index)


def pci_bus_key(bus: str) -> tuple[int, int, int, int]:
    """Return the sort key of `0000:3b:00.0`; raise ValueError for anything else."""
    parts = bus.split(":")
    if len(parts) != BUS_PARTS:
        raise ValueError(f"not a PCI bus id: {bus!r}")
    slot, _, function = parts[2].partition(".")
    return (int(parts[0], 16), int(parts[1], 16), int(slot, 16), int(function, 16))


def read_devices(driver_root: str, sys_root: str) -> list[Device]:
    """Return the node's devices by index; raise Refusal(BROKEN) when no driver is loaded.

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


def card_bus_id(name: str) -> str:
    """Return the PCI bus id in a lock id."""
    return name.partition(".gi")[0].partition(SHARE)[0]


def lock_ids_overlap(a: str, b: str) -> bool:
    """Return whether two locks cannot be held at a time by the same silicon.

    They are equal, or of a card and of its instance or share, or of an instance and a share of one
    card, whose MIG mode was changed. Two shares of a card can.
    """
    if a == b or a.startswith(f"{b}.") or b.startswith(f"{a}."):
        return True
    return (SHARE in a) is not (SHARE in b) and card_bus_id(a) == card_bus_id(b)


def place_device(card: Device, name: str, places: int) -> Device:
    """Return a place on a card under its own id, as one of so many (0: not known)."""
    place = Device(name, card.index)
    place.__dict__ = {**card.__dict__, "id": name, "parent": place.parent, "places": places}
    return place


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

    Without any it stays, as one that is not granted: the driver shows it, so it is not missing.
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
    found: list[Device] = []
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
        found.append(device)
    return found


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


def has_untold_instances(driver_root: str, found: list[Device]) -> bool:
    """Return whether the driver shows MIG instances whose profile is not known."""
    known = {device.id for device in found if device.profile}
    return any(
        [
            f"{device.bus}.{name}" not in known
            for device in {d.bus: d for d in found}.values()
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
    found: dict[tuple[str, str], int] = {}
    for key, value in inventory.items():
        if key.startswith("link."):
            _, _, pair = key.partition(".")
            middle = len(pair) // 2  # two bus ids of one length with a dot between
            found[pair[:middle], pair[middle + 1 :]] = kv.int_or_zero(value)
            found[pair[middle + 1 :], pair[:middle]] = kv.int_or_zero(value)
    return found
