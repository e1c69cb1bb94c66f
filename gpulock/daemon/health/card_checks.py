# SPDX-License-Identifier: Apache-2.0
"""The checks of a card by the exporter's sample: what is found wrong, each with evidence. Pure.

A check that cries wolf is worse than none (docs/facts/nvml.md, what degrades): an idle card lowers
the speed of its PCIe link, so speed counts of a card at work alone. A width or a number of links is
compared with what the card had in this boot, or its neighbours have: many slots are narrow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from gpulock.daemon.health.cards import COMMAND
from gpulock.daemon.health.findings import (
    describe_ecc_errors,
    describe_recovery_action,
    parse_first_counter,
    read_uncorrected_errors,
)
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
SLOWED: Final = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
FREE_ONLY: Final = ("clocks", MEMORY_CHECK, "idle_power")  # what only a free card tells
LASTING: Final = 25.0  # seconds for which such a check must fail: the exporter lists every 10
IDLE_POWER: Final = 0.5  # share of the limit that a card without work does not draw
# what degrades every job on the card: such a card is taken last; the rest is told
SERIOUS: Final = (
    *("pcie_width", "pcie_speed", "pcie_replays", "nvlink_links", "nvlink_errors"),
    *(MEMORY_CHECK, COMMAND),
)


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
        self.since: dict[str, float] = {}  # since when a check of a free card fails

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
        """Return what was found without what may pass: a process list is older than its card."""
        self.since = {name: self.since.get(name, now) for name in FREE_ONLY if found.get(name)}
        young = {name for name, since in self.since.items() if now - since < LASTING}
        return {name: why for name, why in found.items() if name not in young}


class CardLook(NamedTuple):
    """One card now: its sample, whether nobody holds or uses it, and the samples of the others."""

    seen: DeviceSample
    free: bool
    others: Collection[DeviceSample]


def judge_card(look: CardLook, had: CardHistory) -> dict[str, str]:
    """Return each check that could be made, with why it failed, or nothing where it is good."""
    found = {**judge_links(look, had), **judge_board(look.seen, look.others)}
    return {**found, **judge_free_card(look.seen)} if look.free else found


def judge_links(look: CardLook, had: CardHistory) -> dict[str, str]:
    """Return the checks of PCIe and NVLink."""
    seen, found = look.seen, dict[str, str]()
    width, generation, links = had.most
    if seen.pcie_width is not None:
        found["pcie_width"] = describe_narrow_link(seen, look.others, width)
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


def judge_board(seen: DeviceSample, others: Collection[DeviceSample]) -> dict[str, str]:
    """Return the checks of ECC, memory rows, recovery and persistence mode."""
    found: dict[str, str] = {}
    if errors := read_uncorrected_errors(seen):
        now = [describe_ecc_errors(count, place) for place, (_, count) in errors.items() if count]
        found["ecc"] = ", ".join(now)
    if seen.remap_pending is not None or seen.remap_failure is not None:
        pending = "a row of its memory waits for a reset" if seen.remap_pending else ""
        failed = "a row of its memory could not be remapped" if seen.remap_failure else ""
        found["remapped_rows"] = failed or pending
    if seen.recovery_action is not None:
        wanted = f"the driver asks for {describe_recovery_action(seen.recovery_action)}"
        found["recovery_action"] = wanted if seen.recovery_action else ""
    if seen.persistence is not None:
        alone = not seen.persistence and any(one.persistence for one in others)
        found["persistence"] = "persistence mode is off, and on for its neighbours" * alone
    return found


def judge_free_card(seen: DeviceSample) -> dict[str, str]:
    """Return the checks that only a card tells which nobody uses."""
    found: dict[str, str] = {}
    if seen.clock_reasons:
        held = [name for name in SLOWED if name in seen.clock_reasons.split(",")]
        found["clocks"] = f"its clocks are held down without work: {' '.join(held)}" * bool(held)
    if seen.memory_used is not None and not seen.coherent:  # the kernel keeps its own pages there
        used = seen.memory_used // MIB
        over = used > LEFTOVER_MIB
        found[MEMORY_CHECK] = f"{used} MiB are in use without a process" * over
    if seen.power is not None and seen.power_limit and seen.utilization is not None:
        much = not seen.utilization and seen.power > IDLE_POWER * seen.power_limit
        found["idle_power"] = f"it draws {seen.power:.0f} W without work" * much
    return found


def describe_serious(found: Mapping[str, str]) -> str:
    """Return why a card is worse than it should be for any job, or nothing."""
    return "; ".join([found[name] for name in SERIOUS if found.get(name)])
