# SPDX-License-Identifier: Apache-2.0
"""What only NVML can tell of the devices: MIG instances, memory, NVLink.

Hot. The exporter asks NVML, root publishes the answer in LOCK_DIR/inventory once it was held
against what the driver shows (gpulock.daemon.reconcile.inventory_file); hooks read it as advice.
"""

from gpulock.node.devices import Device
from gpulock.store import atomic, kv
from gpulock.store.kv import int_or_zero

LINE = "gpulock-inventory 1"


def read_nvml_inventory(lock_dir: str, boot_id: str) -> dict[str, str]:
    """Return what root published from NVML in this boot, or nothing.

    It is advice on MIG, memory and NVLink; that it is missing never stops a claim of whole GPUs.
    """
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{lock_dir}/inventory"), LINE)
    except (OSError, kv.MalformedError):
        return {}
    return pairs if pairs.get("boot_id") == boot_id else {}


def apply_nvml_inventory(devices: list[Device], inventory: dict[str, str]) -> list[Device]:
    """Add what only NVML tells: a card in MIG mode gives way to its instances."""
    if not inventory:
        return devices
    result: list[Device] = []
    for device in devices:
        of = f"gpu.{device.bus}."
        device.uuid = device.uuid or inventory.get(f"{of}uuid", "")
        device.memory_mib = int_or_zero(inventory.get(f"{of}memory_mib", ""))
        device.switched = inventory.get(f"{of}nvswitch") == "1"
        if inventory.get(f"{of}mig") == "1":
            result.extend(mig_instances(device, inventory))
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
        device = Device(parent.bus, parent.index)
        device.id = f"{parent.bus}.{name}"
        device.uuid = inventory[f"{start}{name}.uuid"]
        device.profile = inventory.get(f"{start}{name}.profile", "")
        device.memory_mib = int_or_zero(inventory.get(f"{start}{name}.memory_mib", ""))
        device.minor, device.model = parent.minor, parent.model
        device.numa, device.path, device.fault = parent.numa, parent.path, parent.fault
        found.append(device)
    return found


def mig_instance_key(name: str) -> tuple[int, ...]:
    """Return the sort key of `gi10.ci0`: its numbers."""
    return tuple(
        [int_or_zero("".join([c for c in part if c.isdigit()])) for part in name.split(".")]
    )


def nvlink_counts(inventory: dict[str, str]) -> dict[tuple[str, str], int]:
    """Return the number of NVLinks between each pair of bus ids, both ways round."""
    found: dict[tuple[str, str], int] = {}
    for key, value in inventory.items():
        if key.startswith("link."):
            _, _, pair = key.partition(".")
            middle = len(pair) // 2  # two bus ids of one length with a dot between
            found[pair[:middle], pair[middle + 1 :]] = int_or_zero(value)
            found[pair[middle + 1 :], pair[:middle]] = int_or_zero(value)
    return found
