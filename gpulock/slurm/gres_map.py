# SPDX-License-Identifier: Apache-2.0
"""Which device a position in gres.conf is: STATE_DIR/slurm-map, made by `gpulock install slurm`.

Hot. Slurm names GPUs by their position in slurmd's list, which is neither the minor nor the NVML
index (facts/slurm.md, positions). The map holds minors, which a boot does not change; it lies in
STATE_DIR because /run is empty after a boot. It names the version of gres.conf with which it was
compared. What another version means, gpulockd finds out; no hook reads a site's file.
"""

import os

from gpulock.errors import BROKEN, UNKNOWN, Refusal, os_error_kind
from gpulock.node.device_list import has_untold_instances
from gpulock.node.devices import Device
from gpulock.store import atomic, kv

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.node.context import Node
    from gpulock.node.settings import Settings

MAP_NAME = "slurm-map"
SHARED = "shared"  # the key of the GRES by which slurmd gives out parts of these devices
GRES_CONF, VERSION = "gres_conf", "gres_version"  # keys of the file, and of its compared version
LINE = "gpulock-slurm-map 1"
REINSTALL_HINT = "run gpulock install slurm on this node"


def resolve_gres_devices(state_dir: str, entries: list[str], devices: list[Device]) -> list[Device]:
    """Return the devices that Slurm names; raise Refusal, BROKEN where a card is gone or faulty.

    UNKNOWN where NVML alone knows it, an instance or a UUID: that the exporter tells nothing drains
    no node.
    """
    places = {} if all([not e.isdigit() for e in entries]) else read_gres_map(state_dir)
    by_place = {gres_map_device_name(device): device for device in devices}
    by_uuid = {device.uuid: device for device in devices if device.uuid}
    result: list[Device] = []
    for entry in entries:
        place = places.get(entry, "")
        if entry.isdigit() and not place:
            # slurmd's list changed without gres.conf: by AutoDetect, or by Gres= of slurm.conf
            raise Refusal(UNKNOWN, f"{MAP_NAME} has no position {entry}", REINSTALL_HINT)
        device = by_place.get(place) if place else by_uuid.get(entry)
        if device is None and place.isdigit():
            why = f"the driver shows no GPU for Slurm's {entry} (/dev/nvidia{place})"
            raise Refusal(BROKEN, why, "see gpulock status")
        if device is None:
            raise Refusal(
                UNKNOWN,
                f"nothing tells which device Slurm's {entry} is",
                "does the exporter run? see gpulock inventory; if that device was removed, run"
                " gpulock install slurm",
            )
        if device.fault:
            raise Refusal(BROKEN, f"GPU {device.index}: {device.fault}", "see gpulock status")
        result.append(device)
    return result


def needs_gres_map(devices: list[Device], settings: "Settings") -> bool:
    """Return whether the map alone tells what a position is: Slurm's choice, or of several kinds.

    Of positions that are only counted, on a node of one model, each is a card of that model.
    """
    if settings.slurm_device_selection == "slurm":
        return True
    whole = {device.model for device in devices if not device.parent}
    split = any([device.parent for device in devices])
    return split or len(whole) > 1 or has_untold_instances(settings.driver_root, devices)


def gres_map_device_name(device: Device) -> str:
    """Return how the map names a device: its minor, with `.gi<g>.ci<c>` for a MIG instance."""
    return f"{device.minor}{device.id[len(device.bus) :] if device.parent else ''}"


def read_gres_map(state_dir: str) -> dict[str, str]:
    """Return position -> place; raise Refusal, UNKNOWN where gres.conf has another version."""
    pairs = read_map_pairs(state_dir)
    if is_gres_conf_changed(pairs):
        raise Refusal(
            UNKNOWN,
            f"{pairs[GRES_CONF]} changed, and nobody has compared the {MAP_NAME} with it yet",
            f"gpulockd does it within seconds; without gpulockd {REINSTALL_HINT}",
        )
    return map_positions(pairs)


def map_positions(pairs: dict[str, str]) -> dict[str, str]:
    """Return position -> place of a map."""
    return {key: value for key, value in pairs.items() if key.isdigit()}


def read_map_pairs(state_dir: str) -> dict[str, str]:
    """Return all that the map says; raise Refusal(BROKEN) where there is no map."""
    try:
        return kv.decode_pairs(atomic.read_text(f"{state_dir}/{MAP_NAME}"), LINE)
    except (OSError, kv.MalformedError) as fault:
        kind = os_error_kind(fault, BROKEN) if isinstance(fault, OSError) else BROKEN
        raise Refusal(kind, f"{MAP_NAME}: {fault}", REINSTALL_HINT) from fault


def is_gres_conf_changed(pairs: dict[str, str]) -> bool:
    """Return whether gres.conf has another version than the map was compared with."""
    path = pairs.get(GRES_CONF, "")
    return bool(path) and gres_conf_version(path) != pairs.get(VERSION, "")


def is_map_awaited(node: "Node", positions: list[str]) -> bool:
    """Return whether a job needs the map, and gpulockd has not compared it with gres.conf yet."""
    if not any([entry.isdigit() for entry in positions]):
        return False
    try:
        changed = is_gres_conf_changed(read_map_pairs(node.settings.state_dir))
    except Refusal:
        return False
    return changed and needs_gres_map(node.devices(), node.settings)


def gres_conf_version(path: str) -> str:
    """Return what tells one version of a file from another; `-` where there is no file."""
    try:
        info = os.stat(path)
    except (OSError, ValueError):  # a damaged map may name what is no path
        return "-"
    return f"{info.st_ino}.{info.st_size}.{info.st_ctime_ns}"


def read_shared_gres(state_dir: str) -> tuple[str, ...]:
    """Return the GRES by which slurmd gives out parts of a GPU: shard, mps; none without a map."""
    try:
        return tuple(read_map_pairs(state_dir).get(SHARED, "").split())
    except Refusal:
        return ()
