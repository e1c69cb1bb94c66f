# SPDX-License-Identifier: Apache-2.0
"""The checks of a card by the exporter's sample: what is found wrong, each with evidence. Pure.

A check that cries wolf is worse than none (docs/facts/nvml.md, what degrades): an idle card lowers
the speed of its PCIe link, so speed counts of a card at work alone. A width or a number of links is
compared with what the card had in this boot, or its neighbours have: many slots are narrow.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gpulock.daemon.health.findings import parse_first_counter
from gpulock.node.sample import DeviceSample

MEMORY_CHECK: Final = "memory"
MIB: Final = 1 << 20
LEFTOVER_MIB: Final = 256  # that the driver may keep on a free card
WINDOW: Final = 300.0  # seconds over which errors are counted
AT_WORK: Final = 0.9  # share of the time between two looks
LEAST_WORK: Final = 10.0  # seconds between them: the exporter reads the link every 5
# a minute: docs/facts/nvml.md, what degrades
LIMITS: Final = {
    "pcie_replays": 8.0,
    "nvlink_error.crc_flit": 6000.0,
    "nvlink_error.crc_data": 6000.0,
    "nvlink_error.replay": 1.0,
    "nvlink_error.recovery": 1.0,
}
LASTING: Final = 25.0  # seconds for which memory must be in use: processes are listed every 10


class CardHistory:
    """What is remembered of a card in this boot; times are CLOCK_BOOTTIME seconds.

    `most` are lanes, PCIe generation and NVLinks at most. `counted` has when each counter was read
    at the beginning of its window, and what it was; `rates` how fast it ran in the last one.
    """

    def __init__(self, most: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.most = most
        self.slow = 0  # the PCIe generation under the last load, where it was lower; 0: it was not
        self.counted: dict[str, tuple[float, int]] = {}
        self.rates: dict[str, float] = {}
        self.worked: tuple[float, float] | None = None  # when, seconds at work by then
        self.dirty: float | None = None  # since when memory is in use without a process

    def follow(self, seen: DeviceSample, now: float) -> None:
        """Take a look."""
        self._follow_speed(seen)
        width, generation, links = self.most
        self.most = (
            max(width, seen.pcie_width or 0),
            max(generation, seen.pcie_generation or 0),
            max(links, seen.nvlink_active or 0),
        )
        for name in LIMITS:
            text = seen.own.get(f"c.{name}")
            if text is None:
                self.counted.pop(name, None)
                self.rates.pop(name, None)
                continue
            total = parse_first_counter(text)
            since, before = self.counted.setdefault(name, (now, total))
            if total < before:
                self.counted[name] = now, total
            elif now - since >= WINDOW:
                self.rates[name] = (total - before) * 60.0 / (now - since)
                self.counted[name] = now, total

    def _follow_speed(self, seen: DeviceSample) -> None:
        if seen.busy is None or seen.looked is None or seen.pcie_generation is None:
            self.worked = None
            return
        if self.worked is None or seen.looked - self.worked[0] >= LEAST_WORK:
            if self.worked is not None and seen.looked > self.worked[0]:
                share = (seen.busy - self.worked[1]) / (seen.looked - self.worked[0])
                if share >= AT_WORK:
                    slower = seen.pcie_generation < self.most[1]
                    self.slow = seen.pcie_generation if slower else 0
            self.worked = seen.looked, seen.busy

    def leave_out_passing(self, found: dict[str, str], now: float) -> dict[str, str]:
        """Return what was found without memory that a process has which is not listed yet."""
        if not found.get(MEMORY_CHECK):
            self.dirty = None
            return found
        self.dirty = now if self.dirty is None else self.dirty
        if now - self.dirty >= LASTING:
            return found
        return {name: why for name, why in found.items() if name != MEMORY_CHECK}


def judge_links(
    seen: DeviceSample, others: Collection[DeviceSample], had: CardHistory
) -> dict[str, str]:
    """Return each check of PCIe and NVLink that could be made, with why it failed, or nothing.

    `others` are the samples of the other cards.
    """
    found: dict[str, str] = {}
    width, generation, links = had.most
    if seen.pcie_width is not None:
        found["pcie_width"] = describe_narrow_link(seen, others, width)
    if seen.pcie_generation is not None:
        slow = f"PCIe generation {had.slow} at work, and {generation} before in this boot"
        found["pcie_speed"] = slow if had.slow else ""
    if seen.nvlink_active is not None:
        down = f"{seen.nvlink_active} NVLinks are up, and {links} were in this boot"
        found["nvlink_links"] = down if seen.nvlink_active < links else ""
    for name, limit in LIMITS.items():
        rate = had.rates.get(name)
        if rate is None:
            continue
        check = name if name == "pcie_replays" else "nvlink_errors"
        kind = name.partition(".")[2].replace("_", " ").upper() if "." in name else ""
        what = f"NVLink errors ({kind})" if kind else "PCIe replays"
        why = f"{rate:.0f} {what} a minute, more than {limit:.0f}" if rate > limit else ""
        found[check] = "; ".join(filter(None, (found.get(check, ""), why)))
    return found


def describe_narrow_link(seen: DeviceSample, others: Collection[DeviceSample], most: int) -> str:
    """Return why the PCIe link is too narrow, or nothing."""
    width, best = seen.pcie_width or 0, seen.pcie_width_max or 0
    if width < most:
        return f"x{width} on PCIe, and x{most} before in this boot"
    equal = [one for one in others if one.pcie_width_max == best and one.pcie_width == best]
    if width < best and equal:
        return f"x{width} on PCIe, and its neighbours have x{best}"
    return ""


def judge_memory(seen: DeviceSample) -> dict[str, str]:
    """Return the check of a free card's memory; of a coherent one the kernel keeps pages there."""
    if seen.memory_used is None or seen.coherent:
        return {}
    used = seen.memory_used // MIB
    return {MEMORY_CHECK: f"{used} MiB are in use without a process" * (used > LEFTOVER_MIB)}
