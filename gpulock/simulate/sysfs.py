# SPDX-License-Identifier: Apache-2.0
"""What the kernel shows of the GPUs and the PCI bridges above them in /sys.

The place of a device in the PCI tree is the target of its link in bus/pci/devices
(Documentation/ABI/testing/sysfs-bus-pci and sysfs(5)).
"""

from __future__ import annotations

import posixpath

from gpulock.simulate.machine import Gpu, Machine
from gpulock.simulate.tree import LinkEntry, Tree

NVIDIA = 0x10DE  # PCI vendor
BRIDGE = 0x060400  # PCI class: PCI-to-PCI bridge, which root ports and switch ports are


def sys_tree(machine: Machine) -> Tree:
    """Return `sys` of a machine."""
    tree: Tree = {}
    for gpu in machine.present:
        tree.update(_pci_bridge_tree(machine, gpu))
        folder = f"sys/devices/{gpu_sysfs_path(gpu)}"
        card = machine.card
        tree.update(
            _pci_device_tree(machine, gpu, folder, card.pci_class, (NVIDIA, card.pci_device))
        )
        tree[f"{folder}/driver"] = _relative_link(f"{folder}/driver", "sys/bus/pci/drivers/nvidia")
        for name in (f"devices/{gpu.bus}", f"drivers/nvidia/{gpu.bus}"):
            tree[f"sys/bus/pci/{name}"] = _relative_link(f"sys/bus/pci/{name}", folder)
    return tree


def gpu_sysfs_path(gpu: Gpu) -> str:
    """Return where a GPU hangs below sys/devices: root complex, bridges, itself."""
    root = gpu.bridges[0].rsplit(":", 1)[0]
    return "/".join((f"pci{root}", *gpu.bridges, gpu.bus))


def _pci_bridge_tree(machine: Machine, gpu: Gpu) -> Tree:
    tree: Tree = {}
    folder = posixpath.dirname(f"sys/devices/{gpu_sysfs_path(gpu)}")
    for number in range(len(gpu.bridges) - 1, -1, -1):
        bus = gpu.bridges[number]
        maker = machine.switch if number else machine.root_port
        tree.update(_pci_device_tree(machine, gpu, folder, BRIDGE, maker))
        tree[f"sys/bus/pci/devices/{bus}"] = _relative_link(f"sys/bus/pci/devices/{bus}", folder)
        folder = posixpath.dirname(folder)
    return tree


def _pci_device_tree(
    machine: Machine, gpu: Gpu, folder: str, pci_class: int, maker: tuple[int, int]
) -> Tree:
    return {
        f"{folder}/class": b"0x%06x\n" % pci_class,
        f"{folder}/vendor": b"0x%04x\n" % maker[0],
        f"{folder}/device": b"0x%04x\n" % maker[1],
        f"{folder}/numa_node": b"%d\n" % gpu.numa,
        f"{folder}/local_cpulist": machine.cpus[gpu.numa].encode() + b"\n",
    }


def _relative_link(path: str, target: str) -> LinkEntry:
    return LinkEntry(posixpath.relpath(target, posixpath.dirname(path)))
