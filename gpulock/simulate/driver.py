# SPDX-License-Identifier: Apache-2.0
"""What the NVIDIA driver shows below /proc/driver, letter for letter.

Facts: kernel-open/nvidia/nv-procfs.c and nv-caps.c of NVIDIA/open-gpu-kernel-modules, and what
users pasted of older releases: before 435 there is no `power`, before 450 no capabilities and
`Blacklisted` stands where 460 and later say `GPU Excluded`, before 495 no `GPU Firmware`.
"""

from __future__ import annotations

from gpulock.simulate.machine import DriverRelease, Gpu, Machine, MigDevice
from gpulock.simulate.tree import DeviceEntry, FolderEntry, Tree

MAJOR = 195  # /dev/nvidiaN, Documentation/admin-guide/devices.txt of the kernel
CONTROL_MINOR = 255  # /dev/nvidiactl

# The release branch in which something first appeared.
WITH_POWER, WITH_CAPABILITIES, WITH_EXCLUDED, WITH_FIRMWARE, WITH_BOOST = 435, 450, 460, 495, 570

UNREAD_UUID = "GPU-????????-????-????-????-????????????"
UNREAD_BIOS = "??.??.??.??.??"

# nv-caps.c: a static table, in this order; 32 GPUs of 15 GPU instances of 8 compute instances.
FABRIC_MINOR, CONFIG_MINOR, MONITOR_MINOR, FIRST_GPU_MINOR = 0, 1, 2, 3
GPUS, GPU_INSTANCES, COMPUTE_INSTANCES = 32, 15, 8
OWNER_READS, ALL_READ = 0o400, 0o444

_WARNINGS = (
    "The NVIDIA graphics driver tries to detect potential problems\n"
    "with the host system and warns about them using the system's\n"
    "logging mechanisms. Important warning message are also logged\n"
    "to dedicated text files in this directory.\n"
)


def driver_tree(machine: Machine) -> Tree:
    """Return proc/driver/nvidia and proc/driver/nvidia-caps of a machine."""
    root = "proc/driver/nvidia"
    tree: Tree = {
        f"{root}/version": format_driver_version(machine.driver).encode(),
        f"{root}/params": format_driver_params(machine.driver).encode(),
        f"{root}/registry": b'Binary: ""\n',
        f"{root}/warnings/README": _WARNINGS.encode(),
        f"{root}/gpus": FolderEntry(),
    }
    for gpu in machine.present:
        tree[f"{root}/gpus/{gpu.bus}/information"] = format_gpu_information(machine, gpu).encode()
        tree[f"{root}/gpus/{gpu.bus}/registry"] = b'Binary: ""\n'
        if machine.driver.branch >= WITH_POWER:
            tree[f"{root}/gpus/{gpu.bus}/power"] = format_gpu_power(machine).encode()
    if machine.driver.branch >= WITH_CAPABILITIES:
        tree["proc/driver/nvidia-caps/mig-minors"] = format_mig_minors().encode()
        tree["proc/driver/nvidia-caps/nvlink-minors"] = f"fabric-mgmt {FABRIC_MINOR}\n".encode()
        for name, minor in list_capability_minors(machine).items():
            mode = OWNER_READS if name == "mig/config" else ALL_READ
            tree[f"{root}/capabilities/{name}"] = format_capability_file(minor, mode).encode()
    return tree


def device_tree(machine: Machine) -> Tree:
    """Return the device files of a machine; those of MIG only where a card is split."""
    tree: Tree = {
        "dev/nvidiactl": DeviceEntry(MAJOR, CONTROL_MINOR),
        "dev/nvidia-uvm": DeviceEntry(None, 0),
        "dev/nvidia-uvm-tools": DeviceEntry(None, 1),
    }
    tree.update(
        {f"dev/nvidia{gpu.minor}": DeviceEntry(MAJOR, gpu.minor) for gpu in machine.present}
    )
    if any(gpu.mig for gpu in machine.present):
        for minor in list_capability_minors(machine).values():
            tree[f"dev/nvidia-caps/nvidia-cap{minor}"] = DeviceEntry(None, minor)
    return tree


def format_driver_version(driver: DriverRelease) -> str:
    """Return the two lines of `version`."""
    return f"NVRM version: {driver.banner}\nGCC version:  {driver.compiler}\n"


def format_gpu_information(machine: Machine, gpu: Gpu) -> str:
    """Return `information` of one GPU."""
    card, branch = machine.card, machine.driver.branch
    lines = [
        f"Model: \t\t {card.model}",
        f"IRQ:   \t\t {gpu.irq}",
        f"GPU UUID: \t {machine.uuid(gpu) if machine.initialised else UNREAD_UUID}",
        f"Video BIOS: \t {card.video_bios if machine.initialised else UNREAD_BIOS}",
        "Bus Type: \t PCIe",
        f"DMA Size: \t {card.dma_bits} bits",
        f"DMA Mask: \t 0x{2**card.dma_bits - 1:x}",
        f"Bus Location: \t {gpu.bus}",
        f"Device Minor: \t {gpu.minor}",
    ]
    if branch >= WITH_FIRMWARE:
        lines.append(f"GPU Firmware: \t {machine.driver.version if card.has_gsp else 'N/A'}")
    excluded = "GPU Excluded" if branch >= WITH_EXCLUDED else "Blacklisted"
    lines.append(f"{excluded}:\t No")
    return "\n".join(lines) + "\n"


def format_gpu_power(machine: Machine) -> str:
    """Return `power` of a GPU of a server: it never sleeps."""
    known = machine.initialised
    support, sleep = ("Not Supported", "Disabled by default") if known else ("?", "?")
    text = (
        f"Runtime D3 status:          {sleep}\n"
        f"Video Memory:               {'Active' if known else '?'}\n\n"
        "GPU Hardware Support:\n"
        f" Video Memory Self Refresh: {support}\n"
        f" Video Memory Off:          {support}\n\n"
        "S0ix Power Management:\n"
        " Platform Support:          Not Supported\n"
        f" Status:                    {'Disabled' if known else '?'}\n"
    )
    if machine.driver.branch >= WITH_BOOST:
        text += f"\nNotebook Dynamic Boost:     {support}\n"
    return text


def format_driver_params(driver: DriverRelease) -> str:
    """Return the lines of `params` that say who may open the device files, and those around."""
    lines = [
        "ResmanDebugLevel: 4294967295",
        "RmLogonRC: 1",
        "ModifyDeviceFiles: 1",
        "DeviceFileUID: 0",
        "DeviceFileGID: 0",
        "DeviceFileMode: 438",
        "InitializeSystemMemoryAllocations: 1",
        "UsePageAttributeTable: 4294967295",
        "EnableMSI: 1",
        'RegistryDwords: ""',
        'RegistryDwordsPerDevice: ""',
        'RmMsg: ""',
        'GpuBlacklist: ""',
        'TemporaryFilePath: ""',
    ]
    if driver.branch >= WITH_EXCLUDED:
        lines.append('ExcludedGpus: ""')
    return "\n".join(lines) + "\n"


def format_capability_file(minor: int, mode: int) -> str:
    """Return a capability file: which /dev/nvidia-caps/nvidia-cap<minor> stands for it."""
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"


def gpu_instance_minor(gpu_minor: int, gi: int) -> int:
    """Return the capability minor of a GPU instance; `gpu_minor` is the N of /dev/nvidiaN."""
    per_instance = 1 + COMPUTE_INSTANCES
    return FIRST_GPU_MINOR + (gpu_minor * GPU_INSTANCES + gi) * per_instance


def compute_instance_minor(gpu_minor: int, instance: MigDevice) -> int:
    """Return the capability minor of a compute instance."""
    return gpu_instance_minor(gpu_minor, instance.gi) + 1 + instance.ci


def list_capability_minors(machine: Machine) -> dict[str, int]:
    """Return the capability files that exist and their minors; instances only where made."""
    files = {"mig/config": CONFIG_MINOR, "mig/monitor": MONITOR_MINOR}
    for gpu in machine.present:
        for instance in gpu.mig:
            gi = f"gpu{gpu.minor}/mig/gi{instance.gi}"
            files[f"{gi}/access"] = gpu_instance_minor(gpu.minor, instance.gi)
            files[f"{gi}/ci{instance.ci}/access"] = compute_instance_minor(gpu.minor, instance)
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
