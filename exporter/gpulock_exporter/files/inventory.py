# SPDX-License-Identifier: Apache-2.0
"""What only NVML can tell of the devices, as `gpulock.node.devices` reads it.

Written into the exporter's own folder: root checks each entry against the driver before it
publishes it in LOCK_DIR. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpulock.node.inventory import LINE as INVENTORY_LINE
from gpulock.store import kv
from gpulock_exporter.state.plausibility import device_lock_id, normalize_bus_id
from gpulock_exporter.telemetry import DeviceTelemetry

MIB = 1 << 20
SWITCH = "switch"  # the NVSwitches among the links of a device

Links = Mapping[str, Mapping[str, int]]


def inventory_text(devices: Mapping[str, DeviceTelemetry], links: Links, boot_id: str) -> str:
    """Return the inventory of cleaned devices; `links` by bus id are those last told."""
    pairs = [("boot_id", boot_id)]
    for _, device in sorted(devices.items()):
        pairs += (
            inventory_instance_pairs(device)
            if device.parent
            else inventory_card_pairs(device, links)
        )
    whole = [bus for bus, device in devices.items() if not (device.mig or device.parent)]
    pairs += inventory_link_pairs({bus: links.get(bus, {}) for bus in whole})
    return f"{INVENTORY_LINE}\n{kv.encode_pairs(pairs)}"


def inventory_card_pairs(device: DeviceTelemetry, links: Links) -> Iterator[tuple[str, str]]:
    """Yield what there is to say of a card. In MIG mode its NVLinks are off."""
    key = f"gpu.{device.bus}"
    if device.uuid:
        yield f"{key}.uuid", device.uuid
    if device.memory_total:
        yield f"{key}.memory_mib", str(device.memory_total // MIB)
    yield f"{key}.mig", "1" if device.mig else "0"
    if not device.mig and links.get(device.bus, {}).get(SWITCH):
        yield f"{key}.nvswitch", "1"


def inventory_instance_pairs(device: DeviceTelemetry) -> Iterator[tuple[str, str]]:
    """Yield what there is to say of an instance; without a UUID it cannot be granted."""
    if not device.uuid:
        return
    key = f"mig.{device_lock_id(device)}"
    yield f"{key}.uuid", device.uuid
    if device.profile:
        yield f"{key}.profile", device.profile
    if device.memory_total:
        yield f"{key}.memory_mib", str(device.memory_total // MIB)


def inventory_link_pairs(links: Links) -> Iterator[tuple[str, str]]:
    """Yield each pair of cards that is joined, once; of two counts the smaller."""
    for bus, of in sorted(links.items()):
        for name, count in sorted(of.items()):
            peer = normalize_bus_id(name)
            if not peer or peer not in links or not bus < peer or len(bus) != len(peer):
                continue
            back = {normalize_bus_id(other): number for other, number in links[peer].items()}
            joined = min(count, back.get(bus, count))
            if joined:
                yield f"link.{bus}.{peer}", str(joined)
