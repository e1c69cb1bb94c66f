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

from gpulock.errors import Refusal
from gpulock.install.files import InstallError
from gpulock.install.slurm.site import SlurmError, SlurmSite, list_other_nodes
from gpulock.install.slurm.slurm_conf import expand_bracket_ranges, read_node_lines
from gpulock.node import devices
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
_CONFIGURED: Final = re.compile(r"\bGres=(?:\S*,)?(gpu(?::[^\s:,()]+)?:[1-9]\d*)")  # of a node
_CARD: Final = re.compile(r"nvidia(\d+)")
_CAPABILITY: Final = re.compile(r"nvidia-cap(\d+)")
LOOK_AT_LIST: Final = (
    "run slurmd -G and read its errors: with AutoDetect=nvml the loader must find libnvidia-ml.so"
    " (ldconfig), else look at NodeName= and File= in gres.conf"
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


def read_gres_list(site: SlurmSite) -> GresList:
    """Return slurmd's own list; raise InstallError where two nodes here differ."""
    lists = [parse_gres_list(site.gres(node)) for node in site.nodes or ("",)]
    if any(one.positions != lists[0].positions for one in lists):
        raise InstallError(
            f"the nodes of this machine ({' '.join(site.nodes)}) have different GPUs in gres.conf,"
            " and there is one map: set SLURM_CONF to the file of one, and give the others settings"
            " of their own"
        )
    return lists[0]


def find_unlisted_gpus(site: SlurmSite) -> str:
    """Return which GPUs of this node slurmctld gives out, of a slurmd that lists none; or nothing.

    Nothing where slurmctld does not answer.
    """
    try:
        shown = site.scontrol("show", "node", "-o").splitlines()
    except SlurmError:
        return ""
    for line in shown:
        name = line.partition(" ")[0].partition("=")[2]
        found = _CONFIGURED.search(line)
        if found and not list_other_nodes(line, site.nodes, os.uname().nodename):
            return f"slurmctld gives {name} {found[1]}, and slurmd -G lists none here"
    return ""


def counts_by_gres(settings: Settings) -> bool:
    """Say whether jobs get GPUs by slurmd's list of gres/gpu, not by a mere count."""
    return settings.slurm_device_selection == "slurm" or settings.slurm_count == "gpus"


def slurm_map_text(
    source: GresSource | None,
    places: list[str],
    shared: Sequence[str] = (),
) -> str:
    """Return the text of the map; `shared` are the GRES that are parts of its devices; pure."""
    pairs = [(GRES_CONF, str(source.path) if source else "")]
    pairs += [(VERSION, source.version), (MEANING, source.meaning)] if source else []
    pairs += [(SHARED, " ".join(shared))] if shared else []
    pairs += [(str(number), place) for number, place in enumerate(places)]
    return f"{LINE}\n{kv.encode_pairs(pairs)}"


def map_places(settings: Settings, wanted: Sequence[tuple[str, ...]]) -> tuple[list[str], str]:
    """Return the place of each position, none and why where no hook reads them.

    Raises InstallError.
    """
    try:
        return GresDeviceFiles(settings).devices_of_positions(wanted), ""
    except InstallError as fault:
        if needs_gres_map(Node(settings).devices_if_driver(), settings):
            raise
        return [], f"no map of Slurm's positions, which no hook reads here: {fault}"


class GresDeviceFiles:
    """What the driver calls the device files of this node; raises InstallError."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # /dev elsewhere is a simulated or a lab's: its files may be any kind.
        self.by_name = bool(settings.simulation) or settings.dev_root != "/dev"
        self._instances: dict[int, str] | None = None

    def devices_of_positions(self, wanted: Sequence[tuple[str, ...]]) -> list[str]:
        """Return the place of each position, which must be a device that the driver shows."""
        if not wanted:
            return []
        try:
            found = devices.read_devices(self.settings.driver_root, self.settings.sys_root)
        except Refusal as refusal:
            raise InstallError(f"{refusal.why}; {refusal.do}, then run it again") from refusal
        shown = {device.minor for device in found if not device.fault}
        places: list[str] = []
        for number, files in enumerate(wanted):
            place = self.device_of_position(files)
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

    def device_of_position(self, files: tuple[str, ...]) -> str:
        """Return `<minor>`, or `<minor>.gi<g>.ci<c>` for the files of a MIG instance."""
        cards: list[int] = []
        capabilities: list[str] = []
        for name in files:
            if _CAPABILITY.fullmatch(Path(name).name):
                capabilities.append(name)
            else:
                cards.append(self.minor(name))
        if len(cards) != 1:
            raise InstallError(
                f"{','.join(files)} holds {len(cards)} cards: one position must be one card, or"
                " one card with the capabilities of one MIG instance; correct gres.conf"
            )
        if not capabilities:
            return str(cards[0])
        return f"{cards[0]}.{self.instance(cards[0], capabilities)}"

    def minor(self, name: str) -> int:
        """Return the minor of a card's device file."""
        info = _stat_device_file(name)
        if stat.S_ISCHR(info.st_mode) and os.major(info.st_rdev) == devices.MAJOR:
            return os.minor(info.st_rdev)
        found = _CARD.fullmatch(Path(name).resolve().name)
        if self.by_name and found:
            return int(found[1])
        raise InstallError(f"{name} is no NVIDIA device (major {devices.MAJOR}); correct gres.conf")

    def instance(self, card: int, capabilities: list[str]) -> str:
        """Return `gi<g>.ci<c>` for the capability files of one instance."""
        if self._instances is None:
            self._instances = read_mig_capabilities(f"{self.settings.driver_root}-caps/mig-minors")
        names = [self._instances.get(self.capability(name), "") for name in capabilities]
        compute = [name for name in names if "/ci" in name]
        whole = compute[0].rpartition("/")[0] if compute else ""
        if len(compute) != 1 or not all(name in (whole, compute[0]) for name in names):
            found = " and ".join(name or "unknown" for name in names)
            raise InstallError(
                f"{','.join(capabilities)} ({found}) is not one MIG instance; see"
                " /proc/driver/nvidia-caps/mig-minors and correct gres.conf"
            )
        gpu, gi, ci = compute[0].split("/")
        if gpu != f"gpu{card}":
            raise InstallError(
                f"{capabilities[0]} belongs to {gpu}, not to card {card}; correct it"
            )
        folder = f"{self.settings.driver_root}/capabilities/gpu{card}/mig/{gi}/{ci}"
        if not os.path.isdir(folder):
            raise InstallError(
                f"MIG instance {gi}.{ci} of card {card} does not exist; make it first"
            )
        return f"{gi}.{ci}"

    def capability(self, name: str) -> int:
        """Return the minor of a capability's device file."""
        info = _stat_device_file(name)
        if stat.S_ISCHR(info.st_mode) and not self.by_name:
            return os.minor(info.st_rdev)
        found = _CAPABILITY.fullmatch(Path(name).name)
        assert found is not None
        return int(found[1])


def read_mig_capabilities(path: str) -> dict[int, str]:
    """Return `gpu0/gi1` or `gpu0/gi1/ci0` by the minor of its capability; raise InstallError."""
    try:
        table = atomic.read_text(path, 1 << 20)
    except OSError as fault:
        raise InstallError(f"{path}: {fault.strerror}; gres.conf names MIG instances") from fault
    found = re.findall(r"(?m)^(gpu\d+/gi\d+(?:/ci\d+)?)/access (\d+)$", table)
    return {int(minor): name for name, minor in found}


def _stat_device_file(name: str) -> os.stat_result:
    try:
        return os.stat(name)
    except OSError as fault:
        raise InstallError(f"{name}: {fault.strerror}; correct gres.conf") from fault


# --- what gres.conf says of this node -----------------------------------------------------------


@dataclass(frozen=True)
class GresSource:
    """gres.conf as the map was compared with it: its version, and what its lines mean here."""

    path: Path
    version: str
    meaning: str


def find_gres_conf(site: SlurmSite) -> Path | None:
    """Return this node's gres.conf, by the name that slurmd knows."""
    path = site.gres_conf
    return path if path is not None and path.exists() else None


def read_gres_source(site: SlurmSite) -> GresSource | None:
    """Return this node's gres.conf, None where there is none; raise InstallError."""
    path = find_gres_conf(site)
    if path is None:
        return None
    version = gres_conf_version(str(path))  # first: what is written meanwhile is another one
    return GresSource(path, version, gres_meaning(read_node_lines(path, site.node_names())))


def gres_meaning(lines: list[dict[str, str]]) -> str:
    """Return what is the same for lines of gres.conf that say the same; pure."""
    said = [sorted(line.items()) for line in lines]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def gpu_flags(gres_conf: Path, nodes: tuple[str, ...]) -> list[list[str]]:
    """Return the Flags= of each line of gres.conf that gives these nodes GPUs."""
    lines = read_node_lines(gres_conf, nodes) if gres_conf.exists() else []
    return [
        line.get("flags", "").lower().split(",")
        for line in lines
        if line.get("name", "").lower() == _GPU
    ]


def has_gres_flag(gres_conf: Path, nodes: tuple[str, ...], flag: str = "no_gpu_env") -> bool:
    """Say whether gres.conf sets a flag for all GPUs of these nodes."""
    flags = gpu_flags(gres_conf, nodes)
    return bool(flags) and all(flag in words for words in flags)
