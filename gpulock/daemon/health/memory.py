# SPDX-License-Identifier: Apache-2.0
"""Whether a free device's memory was given back, by the exporter's sample. Pure."""

from __future__ import annotations

from typing import Final

from gpulock.node.sample import DeviceSample

CLEAN, DIRTY, NOT_KNOWN = "clean", "dirty", "not known"
MIB: Final = 1 << 20
LEFTOVER_MIB: Final = 256  # that the driver may keep on a free card


def judge_memory(seen: DeviceSample | None, since: float = 0.0) -> str:
    """Return CLEAN, NOT_KNOWN, or DIRTY: more than LEFTOVER_MIB are in use without a process.

    A sample and its list of processes count only when they are newer than `since`. The kernel
    keeps pages of its own in the memory of a coherent card.
    """
    if seen is None or seen.memory_used is None or (seen.looked or 0.0) <= since:
        return NOT_KNOWN
    if seen.coherent or seen.memory_used <= LEFTOVER_MIB * MIB:
        return CLEAN
    listed_before = seen.listed is not None and seen.listed <= since
    return NOT_KNOWN if seen.processes != 0 or listed_before else DIRTY
