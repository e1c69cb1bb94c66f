# SPDX-License-Identifier: Apache-2.0
"""What the NVIDIA driver shows below /proc/driver, as far as gpulock reads it, and /sys.

Facts: kernel-open/nvidia/nv-procfs.c and nv-caps.c of NVIDIA/open-gpu-kernel-modules, and what
users pasted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Union

from gpulock.simulate.machine import Gpu, Machine

# nv-caps.c: a static table, in this order; 32 GPUs of 15 GPU instances of 8 compute instances.
CONFIG_MINOR, MONITOR_MINOR, FIRST_GPU_MINOR = 1, 2, 3
GPUS, GPU_INSTANCES, COMPUTE_INSTANCES = 32, 15, 8
OWNER_READS, ALL_READ = 0o400, 0o444
FOLDER_MODE = 0o755
FILE_MODE = 0o644
WRITABLE = 0o022  # by others
DEVICES = "dev/"  # begins the paths of device files, which are empty regular files
DEVICE_MODE = 0o666  # as the driver's DeviceFileMode 438
# a file's bytes, a link's target, or a folder that may be empty
Entry = Union[bytes, str, None]
Tree = dict[str, Entry]


def driver_tree(machine: Machine) -> Tree:
    """Return proc/driver/nvidia and proc/driver/nvidia-caps of a machine."""
    root = "proc/driver/nvidia"
    tree: Tree = {
        f"{root}/version": f"NVRM version: {machine.driver}\n".encode(),
        f"{root}/gpus": None,
    }
    for gpu in machine.gpus:
        tree[f"{root}/gpus/{gpu.bus}/information"] = format_gpu_information(machine, gpu).encode()
    tree["proc/driver/nvidia-caps/mig-minors"] = format_mig_minors().encode()
    for name, minor in list_capability_minors(machine).items():
        mode = OWNER_READS if name == "mig/config" else ALL_READ
        text = f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
        tree[f"{root}/capabilities/{name}"] = text.encode()
    return tree


def device_tree(machine: Machine) -> Tree:
    """Return the device files of a machine; those of MIG only where a card is split."""
    names = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
    names += [f"nvidia{gpu.minor}" for gpu in machine.gpus]
    if any(gpu.mig for gpu in machine.gpus):
        minors = list_capability_minors(machine).values()
        names += [f"nvidia-caps/nvidia-cap{minor}" for minor in minors]
    return {f"dev/{name}": b"" for name in names}


def sys_tree(machine: Machine) -> Tree:
    """Return `sys` of a machine: each GPU at its place in the PCI tree, where a link leads.

    Documentation/ABI/testing/sysfs-bus-pci of the kernel, and sysfs(5).
    """
    tree: Tree = {}
    for gpu in machine.gpus:
        root = gpu.bridges[0].rsplit(":", 1)[0]
        folder = "/".join((f"devices/pci{root}", *gpu.bridges, gpu.bus))
        tree[f"sys/{folder}/numa_node"] = b"%d\n" % gpu.numa
        tree[f"sys/bus/pci/devices/{gpu.bus}"] = f"../../../{folder}"
    return tree


def format_gpu_information(machine: Machine, gpu: Gpu) -> str:
    """Return `information` of one GPU."""
    lines = [
        f"Model: \t\t {machine.card.model}",
        f"GPU UUID: \t {machine.uuid(gpu)}",
        "Bus Type: \t PCIe",
        f"Bus Location: \t {gpu.bus}",
        f"Device Minor: \t {gpu.minor}",
        "GPU Excluded:\t No",
    ]
    return "\n".join(lines) + "\n"


def gpu_instance_minor(gpu_minor: int, gi: int) -> int:
    """Return the capability minor of a GPU instance; `gpu_minor` is the N of /dev/nvidiaN."""
    per_instance = 1 + COMPUTE_INSTANCES
    return FIRST_GPU_MINOR + (gpu_minor * GPU_INSTANCES + gi) * per_instance


def list_capability_minors(machine: Machine) -> dict[str, int]:
    """Return the capability files that exist and their minors; instances only where made."""
    files = {"mig/config": CONFIG_MINOR, "mig/monitor": MONITOR_MINOR}
    for gpu in machine.gpus:
        for instance in gpu.mig:
            gi = f"gpu{gpu.minor}/mig/gi{instance.gi}"
            first = gpu_instance_minor(gpu.minor, instance.gi)
            files[f"{gi}/access"] = first
            files[f"{gi}/ci{instance.ci}/access"] = first + 1 + instance.ci
    return files


def format_mig_minors() -> str:
    """Return `mig-minors`: all that could be, whatever cards there are."""
    lines = [f"config {CONFIG_MINOR}", f"monitor {MONITOR_MINOR}"]
    for gpu in range(GPUS):
        for gi in range(GPU_INSTANCES):
            first = gpu_instance_minor(gpu, gi)
            lines.append(f"gpu{gpu}/gi{gi}/access {first}")
            lines += [
                f"gpu{gpu}/gi{gi}/ci{ci}/access {first + 1 + ci}" for ci in range(COMPUTE_INSTANCES)
            ]
    return "\n".join(lines) + "\n"


def write_tree(root: Path, tree: Mapping[str, Entry]) -> None:
    """Write `tree` below `root`, which must not hold any of its files yet.

    Modes are set whatever the umask is: hooks refuse a lock folder that a group may write.
    """
    before = os.umask(WRITABLE)
    try:
        for path, entry in sorted(tree.items()):
            target = root / path
            (target if entry is None else target.parent).mkdir(parents=True, exist_ok=True)
            if isinstance(entry, str):
                os.symlink(entry, target)
            elif entry is not None:
                with target.open("xb") as file:
                    file.write(entry)
                    os.fchmod(file.fileno(), DEVICE_MODE if path.startswith(DEVICES) else FILE_MODE)
    finally:
        os.umask(before)
