# SPDX-License-Identifier: Apache-2.0
"""The checks of a card by the exporter's sample: what is found wrong, each with evidence. Pure.

A check that cries wolf is worse than none (docs/facts/nvml.md, what degrades). A width or a number
of links is compared with what the card had in this boot, or its neighbours have: many slots are
narrow.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gpulock.node.sample import DeviceSample

MEMORY_CHECK: Final = "memory"
MIB: Final = 1 << 20
LEFTOVER_MIB: Final = 256  # that the driver may keep on a free card


def check_links(
    seen: DeviceSample, others: Collection[DeviceSample], most: tuple[int, int]
) -> dict[str, str]:
    """Return each check of PCIe and NVLink that could be made, with why it failed, or nothing.

    `others` are the samples of the other cards, `most` the lanes and NVLinks that it had.
    """
    found: dict[str, str] = {}
    if seen.pcie_width is not None:
        best = seen.pcie_width_max or 0
        equal = [one for one in others if one.pcie_width_max == best and one.pcie_width == best]
        found["pcie_width"] = ""
        if seen.pcie_width < most[0]:
            found["pcie_width"] = f"x{seen.pcie_width} on PCIe, and x{most[0]} before in this boot"
        elif seen.pcie_width < best and equal:
            found["pcie_width"] = f"x{seen.pcie_width} on PCIe, and its neighbours have x{best}"
    if seen.nvlink_active is not None:
        down = f"{seen.nvlink_active} NVLinks are up, and {most[1]} were in this boot"
        found["nvlink_links"] = down if seen.nvlink_active < most[1] else ""
    return found


def check_memory(seen: DeviceSample) -> dict[str, str]:
    """Return the check of a free card's memory; of a coherent one the kernel keeps pages there."""
    if seen.memory_used is None or seen.coherent:
        return {}
    used = seen.memory_used // MIB
    return {MEMORY_CHECK: f"{used} MiB are in use without a process" * (used > LEFTOVER_MIB)}
