# SPDX-License-Identifier: Apache-2.0
"""What a simulated machine is made of: driver, card, GPUs, PCI bridges, NVLinks."""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriverRelease:
    """One release of the NVIDIA kernel module.

    `banner` and `compiler` are what /proc/driver/nvidia/version shows after its two labels;
    `compiler` may end in the blank that `gcc -v` leaves there.
    """

    version: str
    banner: str
    compiler: str

    @property
    def branch(self) -> int:
        """Return the release branch: 535 of 535.129.03."""
        return int(self.version.split(".", 1)[0])


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A model of GPU. `dma_bits` is the width of a DMA address, `memory_mib` NVML's total."""

    model: str
    pci_device: int
    pci_class: int
    video_bios: str
    memory_mib: int
    dma_bits: int
    has_gsp: bool  # from Turing on the driver runs firmware on the card


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A MIG device: compute instance `ci` of GPU instance `gi`."""

    gi: int
    ci: int
    profile: str
    memory_mib: int

    @property
    def name(self) -> str:
        """Return `gi1.ci0`, the part of a lock id after the bus id."""
        return f"gi{self.gi}.ci{self.ci}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card in its slot. `bridges` lead from the root port down to it; `numa` -1 is unknown."""

    bus: str
    bridges: tuple[str, ...]
    numa: int
    minor: int
    irq: int
    mig: tuple[MigDevice, ...] = ()
    fallen: bool = False  # off the bus: expected, but neither driver nor kernel shows it


@dataclass(frozen=True, slots=True)
class Machine:
    """A whole machine. `links` are direct NVLinks as (index, index, count) with a < b.

    `root_port` and `switch` are (vendor, device) of the PCI bridges; `cpus[n]` is the cpulist of
    NUMA node n, and the last one is used where the node is unknown.
    """

    name: str
    summary: str
    driver: DriverRelease
    card: GpuModel
    gpus: tuple[Gpu, ...]
    cpus: tuple[str, ...]
    root_port: tuple[int, int]
    switch: tuple[int, int]
    links: tuple[tuple[int, int, int], ...] = ()
    nvswitch: bool = False
    initialised: bool = True  # False: no client has opened the cards yet, UUIDs are unread

    @property
    def present(self) -> tuple[Gpu, ...]:
        """Return the GPUs that driver and kernel show."""
        return tuple(gpu for gpu in self.gpus if not gpu.fallen)

    def take(self, count: int) -> Machine:
        """Return this machine with its first `count` slots only."""
        links = tuple(link for link in self.links if link[1] < count)
        return dataclasses.replace(self, gpus=self.gpus[:count], links=links)

    def uuid(self, gpu: Gpu) -> str:
        """Return the UUID of a card: the same each time, another for each model and slot."""
        digest = hashlib.sha256(f"{self.card.model} {gpu.bus}".encode()).hexdigest()
        return f"GPU-{uuid.UUID(digest[:32])}"

    def instance_uuid(self, gpu: Gpu, instance: MigDevice) -> str:
        """Return the UUID of a MIG device; version 5, as the driver's are."""
        parent = uuid.UUID(self.uuid(gpu).removeprefix("GPU-"))
        return f"MIG-{uuid.uuid5(parent, instance.name)}"
