# SPDX-License-Identifier: Apache-2.0
"""Which device stands at which position of slurmd's list, in the form of STATE_DIR/slurm-map.

The order is what `slurmd -G` prints, not that of gres.conf's lines: Slurm sorts them by the types
in slurm.conf's Gres=, cuts off what is too much, and sorts by file and links with AutoDetect
(gres.c and gres_gpu.c of 22.05; tried with ConstrainDevices).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from gpulock.errors import Refusal
from gpulock.install.files import InstallError
from gpulock.install.slurm.site import SlurmSite
from gpulock.install.slurm.slurm_conf import expand_bracket_ranges, read_node_lines
from gpulock.node import device_list, devices
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.slurm.gres_map import (
    GRES_CONF,
    LINE,
    SHARED,
    VERSION,
    gres_conf_version,
    needs_gres_map,
)
from gpulock.store import atomic, kv

_GPU: Final = "gpu"
_PARTS: Final = ("shard", "mps")  # GRES that are parts of another's devices
_ENTRY: Final = re.compile(r"\bGres Name=(\S+) .*?\bCount=(\d+)\b")
_FILE: Final = re.compile(r" File=(\S+)")
_MAJOR: Final = devices.MAJOR
_CARD: Final = re.compile(r"nvidia(\d+)")
_CAPABILITY: Final = re.compile(r"nvidia-cap(\d+)")
NO_GRES: Final = "slurmd -G lists no gres/gpu with File= of this node, so no job gets a GPU here"
LOOK_AT_LIST: Final = (
    "read its errors: with AutoDetect=nvml the loader must find libnvidia-ml.so (ldconfig), else"
    " look at NodeName= and File= in gres.conf, at Gres= and GresTypes=gpu in slurm.conf"
)
MEANING: Final = "gres_meaning"  # a key of the map that no hook reads


@dataclass(frozen=True)
class GresList:
    """What slurmd lists: the device files of each position, and the GRES that are parts of GPUs."""

    positions: tuple[tuple[str, ...], ...]
    shared: tuple[str, ...]


def parse_gres_list(text: str) -> GresList:
    """Return what `slurmd -G` prints, in its order; raise InstallError; pure."""
    positions: list[tuple[str, ...]] = []
    shared: set[str] = set()
    for line in text.splitlines():
        match = _ENTRY.search(line)
        if match is None or match[2] == "0":
            continue
        if match[1] in _PARTS:
            shared.add(match[1])
        if match[1] != _GPU:
            continue
        count, named = int(match[2]), _FILE.search(line)
        files = expand_bracket_ranges(named[1], "gres.conf") if named else []
        if len(files) == count:
            positions += [(name,) for name in files]
        elif count == 1 and files:
            positions.append(tuple(files))  # MultipleFiles: one resource
        else:
            raise InstallError(f"slurmd's list is not understood: {line.strip()}; report this line")
    return GresList(tuple(positions), tuple(sorted(shared)))


def by_slurm(settings: Settings) -> bool:
    """Say whether Slurm chooses the devices of a job."""
    return settings.slurm_device_selection == "slurm"


def slurm_map_text(source: GresSource, places: list[str], shared: Sequence[str] = ()) -> str:
    """Return the text of the map; `shared` are the GRES that are parts of its devices; pure."""
    pairs = [(GRES_CONF, source.path), (VERSION, source.version), (MEANING, source.meaning)]
    pairs += [(SHARED, " ".join(shared))] if shared else []
    pairs += [(str(number), place) for number, place in enumerate(places)]
    return f"{LINE}\n{kv.encode_pairs(pairs)}"


def devices_of_positions(settings: Settings, wanted: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the place of each position, none where no hook reads them; raise InstallError.

    Each must be a device that the driver shows.
    """
    if not (wanted and needs_gres_map(Node(settings).devices_if_driver(), settings)):
        return []
    try:
        devices = device_list.read_devices(settings.driver_root, settings.sys_root)
    except Refusal as refusal:
        raise InstallError(f"{refusal.why}; {refusal.do}, then run it again") from refusal
    shown = {device.minor for device in devices if not device.fault}
    places: list[str] = []
    for number, files in enumerate(wanted):
        place = device_of_position(settings, files)
        if int(place.partition(".")[0]) not in shown:
            minors = ",".join(map(str, sorted(shown))) or "none"
            raise InstallError(
                f"position {number} of slurmd's list is {files[0]}, but the driver shows no"
                f" GPU with this minor (only {minors}); correct gres.conf, or look at the card"
            )
        if place in places:
            raise InstallError(
                f"positions {places.index(place)} and {number} of slurmd's list are the same"
                f" device, {files[0]}; correct gres.conf"
            )
        places.append(place)
    return places


def device_of_position(settings: Settings, files: tuple[str, ...]) -> str:
    """Return `<minor>`, or `<minor>.gi<g>.ci<c>` for a card with what opens one MIG instance."""
    capabilities = [name for name in files if _CAPABILITY.fullmatch(Path(name).name)]
    cards = [name for name in files if name not in capabilities]
    if len(cards) != 1:
        raise InstallError(
            f"{','.join(files)} holds {len(cards)} cards: one position must be one card, or"
            " one card with the capabilities of one MIG instance; correct gres.conf"
        )
    card = _device_minor(settings, cards[0], _CARD)
    if not capabilities:
        return str(card)
    table = read_mig_capabilities(f"{settings.driver_root}-caps/mig-minors")
    minors = [_device_minor(settings, name, _CAPABILITY) for name in capabilities]
    opened = {table.get(minor, "unknown") for minor in minors}
    for instance in device_list.driver_mig_instances(settings.driver_root, card):
        compute = f"gpu{card}/{instance.replace('.', '/')}"
        if compute in opened and opened <= {compute, os.path.dirname(compute)}:
            return f"{card}.{instance}"
    raise InstallError(
        f"{','.join(capabilities)} ({' and '.join(sorted(opened))}) is not one MIG instance that"
        f" card {card} has: make it, or correct gres.conf (/proc/driver/nvidia-caps/mig-minors)"
    )


def _device_minor(settings: Settings, name: str, kind: re.Pattern[str]) -> int:
    """Return the minor of a device file; raise InstallError."""
    try:
        info = os.stat(name)
    except OSError as fault:
        raise InstallError(f"{name}: {fault.strerror}; correct gres.conf") from fault
    named = kind.fullmatch(Path(name).resolve().name)
    if named and (settings.simulation or settings.dev_root != "/dev"):
        return int(named[1])  # of a simulated or a lab's /dev: its files may be any kind
    if stat.S_ISCHR(info.st_mode) and (kind is _CAPABILITY or os.major(info.st_rdev) == _MAJOR):
        return os.minor(info.st_rdev)
    raise InstallError(f"{name} is no NVIDIA device (major {_MAJOR}); correct gres.conf")


def read_mig_capabilities(path: str) -> dict[int, str]:
    """Return `gpu0/gi1` or `gpu0/gi1/ci0` by the minor of its capability; raise InstallError."""
    try:
        table = atomic.read_text(path, 1 << 20)
    except OSError as fault:
        raise InstallError(f"{path}: {fault.strerror}; gres.conf names MIG instances") from fault
    rows = re.findall(r"(?m)^(gpu\d+/gi\d+(?:/ci\d+)?)/access (\d+)$", table)
    return {int(minor): name for name, minor in rows}


# --- what gres.conf says of this node -----------------------------------------------------------


@dataclass(frozen=True)
class GresSource:
    """gres.conf as the map was compared with it: its version, and what its lines mean here.

    It has no path where slurmd's folder is not known.
    """

    path: str
    version: str
    meaning: str


def read_gres_source(site: SlurmSite) -> GresSource:
    """Return this node's gres.conf, which may not be there; raise InstallError."""
    path = str(site.gres_conf or "")  # by the name that slurmd knows
    version = gres_conf_version(path)  # first: what is written meanwhile is another one
    return GresSource(path, version, gres_meaning(read_gres_lines(site)))


def read_gres_lines(site: SlurmSite) -> list[dict[str, str]]:
    """Return what the lines of gres.conf say of this node; raise InstallError."""
    path = site.gres_conf
    return read_node_lines(path, site.node) if path and path.exists() else []


def has_slurmd_read(site: SlurmSite) -> bool:
    """Return whether slurmd started after the last change of the files that make its list."""
    files = [path for path in (site.conf, site.gres_conf) if path and path.exists()]
    try:
        changed = max([path.stat().st_ctime for path in files], default=0.0)
        return not site.slurmd or psutil.Process(site.slurmd.pid).create_time() > changed
    except (OSError, psutil.Error):
        return False


def gres_meaning(lines: list[dict[str, str]]) -> str:
    """Return what is the same for lines of gres.conf that say the same; pure."""
    said = [sorted(line.items()) for line in lines]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def has_gres_flag(site: SlurmSite, flag: str) -> bool:
    """Say whether each line of gres.conf that gives this node GPUs sets a flag."""
    lines = [line for line in read_gres_lines(site) if line.get("name", "").lower() == _GPU]
    flags = [line.get("flags", "").lower().split(",") for line in lines]
    return bool(flags) and all(flag in words for words in flags)
