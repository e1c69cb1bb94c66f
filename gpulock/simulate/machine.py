# SPDX-License-Identifier: Apache-2.0
"""What a simulated machine is made of: driver, card, GPUs, PCI bridges, NVLinks; its inventory.

The node has the inventory twice: LOCK_DIR's is gpulockd's to write, from what an exporter tells,
and the exporter reads the other, `nvml`. To read what it has told would let it forget for good.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from dataclasses import dataclass
from typing import NamedTuple


class GpuModel(NamedTuple):
    """A model of GPU; `memory_mib` is NVML's total."""

    model: str
    memory_mib: int


class MigDevice(NamedTuple):
    """A MIG device: compute instance `ci` of GPU instance `gi`."""

    gi: int
    ci: int
    profile: str
    memory_mib: int

    @property
    def name(self) -> str:
        """Return `gi1.ci0`, the part of a lock id after the bus id."""
        return f"gi{self.gi}.ci{self.ci}"


@dataclass(frozen=True)
class Gpu:
    """One card in its slot. `bridges` lead from the root port down to it; `numa` -1 is unknown."""

    bus: str
    bridges: tuple[str, ...]
    numa: int
    minor: int
    mig: tuple[MigDevice, ...] = ()


@dataclass(frozen=True)
class Machine:
    """A whole machine. `links` are direct NVLinks as (index, index, count) with a < b."""

    name: str
    summary: str
    driver: str  # what `version` shows of the kernel module after a label
    card: GpuModel
    gpus: tuple[Gpu, ...]
    links: tuple[tuple[int, int, int], ...] = ()
    nvswitch: bool = False
    shares: str = ""  # of its settings

    def take(self, count: int) -> Machine:
        """Return this machine with its first `count` slots only."""
        links = tuple(link for link in self.links if link[1] < count)
        return dataclasses.replace(self, gpus=self.gpus[:count], links=links)

    def uuid(self, gpu: Gpu) -> str:
        """Return the UUID of a card: the same each time, another for each model and slot."""
        digest = hashlib.sha256(f"{self.card.model} {gpu.bus}".encode()).hexdigest()
        return f"GPU-{uuid.UUID(digest[:32])}"


def list_machine_inventory(machine: Machine) -> dict[str, str]:
    """Return the inventory. In MIG mode a card's NVLinks are off (user guide)."""
    inventory: dict[str, str] = {}
    for gpu in machine.gpus:
        own, card = f"gpu.{gpu.bus}", uuid.UUID(machine.uuid(gpu).removeprefix("GPU-"))
        inventory[f"{own}.uuid"] = machine.uuid(gpu)
        inventory[f"{own}.memory_mib"] = str(machine.card.memory_mib)
        inventory[f"{own}.mig"] = "1" if gpu.mig else "0"
        if machine.nvswitch and not gpu.mig:
            inventory[f"{own}.nvswitch"] = "1"
        for instance in gpu.mig:
            key = f"mig.{gpu.bus}.{instance.name}"
            inventory[f"{key}.uuid"] = f"MIG-{uuid.uuid5(card, instance.name)}"  # as the driver's
            inventory[f"{key}.profile"] = instance.profile
            inventory[f"{key}.memory_mib"] = str(instance.memory_mib)
    for first, second, count in machine.links:
        pair = sorted((machine.gpus[first], machine.gpus[second]), key=lambda gpu: gpu.bus)
        inventory[f"link.{pair[0].bus}.{pair[1].bus}"] = str(count)
    return inventory
