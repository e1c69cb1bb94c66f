# SPDX-License-Identifier: Apache-2.0
"""What only NVML can tell of a simulated machine, as gpulockd publishes it in LOCK_DIR.

The node has it twice: LOCK_DIR's is gpulockd's to write, from what an exporter tells, and the
exporter reads the other, `nvml`. To read what it has itself told would let it forget for good.
"""

from __future__ import annotations

from gpulock.simulate.machine import Gpu, Machine

VERSION_LINE = "gpulock-inventory 1"


def format_machine_inventory(machine: Machine, boot_id: str) -> str:
    """Return the inventory of a machine as of this boot."""
    lines = [VERSION_LINE, f"boot_id={boot_id}"]
    for gpu in machine.present:
        lines += _gpu_lines(machine, gpu)
    for first, second, count in machine.links:
        pair = sorted((machine.gpus[first], machine.gpus[second]), key=lambda gpu: gpu.bus)
        if not any(gpu.fallen for gpu in pair):
            lines.append(f"link.{pair[0].bus}.{pair[1].bus}={count}")
    return "\n".join(lines) + "\n"


def _gpu_lines(machine: Machine, gpu: Gpu) -> list[str]:
    """Return the lines of one card. In MIG mode its NVLinks are off (NVIDIA MIG user guide)."""
    lines = [
        f"gpu.{gpu.bus}.uuid={machine.uuid(gpu)}",
        f"gpu.{gpu.bus}.memory_mib={machine.card.memory_mib}",
        f"gpu.{gpu.bus}.mig={1 if gpu.mig else 0}",
    ]
    if machine.nvswitch and not gpu.mig:
        lines.append(f"gpu.{gpu.bus}.nvswitch=1")
    for instance in gpu.mig:
        key = f"mig.{gpu.bus}.{instance.name}"
        lines += [
            f"{key}.uuid={machine.instance_uuid(gpu, instance)}",
            f"{key}.profile={instance.profile}",
            f"{key}.memory_mib={instance.memory_mib}",
        ]
    return lines
