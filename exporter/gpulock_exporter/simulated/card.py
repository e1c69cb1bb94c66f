# SPDX-License-Identifier: Apache-2.0
"""What a simulated device shows under a load: warmth that follows slowly, counters that run.

The load of a job is a pure function of the device and of the seconds since it was claimed, so that
two exporters that look at one node see the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from gpulock_exporter.telemetry import DeviceTelemetry

MIB = 1 << 20
OBSERVED = 16.0  # seconds that the driver's buffer of samples covers
WARM_LAG = 25.0  # seconds
IDLE, BUSY = 0.02, 0.94  # loads below and above which the clocks have a reason
START = 8.0  # seconds in which a job gets going
LOADING = 20.0  # seconds in which it fills the device's memory
# how jobs work, by device: the middle of a wave, how far it swings, and its seconds
WAVES = ((0.96, 0.02, 20.0), (0.62, 0.3, 60.0), (0.5, 0.4, 54.0), (0.28, 0.12, 90.0))
VOLTA, AMPERE, HOPPER = 7, 8, 9  # first numbers of compute capabilities


class SimulatedModel(NamedTuple):
    """A model of card: watts and clocks in MHz, idle and at most, compute capability, NVLinks.

    A model has what the real one has: no energy of a K80, no GPM before Hopper, so that no instance
    of an A100 tells how busy it is. One for workstations has a fan of its own, and no ECC.
    """

    watts: tuple[float, float]
    sm_clock: tuple[float, float]
    memory_clock: float
    capability: int = AMPERE
    nvlinks: int = 0
    workstation: bool = False


MODELS = {
    "Tesla K80": SimulatedModel((30, 149), (324, 875), 2505, 3),
    "Tesla V100-SXM2-32GB": SimulatedModel((43, 300), (135, 1530), 877, VOLTA, 6),
    "Tesla V100-SXM3-32GB": SimulatedModel((50, 350), (135, 1597), 958, VOLTA, 6),
    "NVIDIA A100-SXM4-80GB": SimulatedModel((62, 400), (210, 1410), 1593, AMPERE, 12),
    "NVIDIA H200": SimulatedModel((77, 700), (345, 1980), 3201, HOPPER, 18),
}
OTHER = SimulatedModel((26, 450), (210, 2520), 10501, workstation=True)


@dataclass
class SimulatedState:
    """What a device remembers from one look to the next."""

    power: float = 0.0  # watts
    warmth: float = 0.0  # the load that its temperature stands for
    energy: float = 0.0
    capped: float = 0.0  # seconds
    worked: float = 0.0  # seconds under full load, by which its links count

    def advance(self, model: SimulatedModel, load: float, seconds: float) -> None:
        """Let `seconds` pass under a load."""
        idle, most = model.watts
        self.power = idle + (most - idle) * load
        self.warmth += (load - self.warmth) * (1 - math.exp(-seconds / WARM_LAG))
        self.energy += self.power * seconds
        self.capped += seconds if load > BUSY else 0.0
        self.worked += load * seconds


def fill_board(
    record: DeviceTelemetry, model: SimulatedModel, state: SimulatedState, load: float
) -> None:
    """Say what belongs to the board."""
    record.power = round(state.power, 2)
    record.power_limit = record.power_limit_enforced = model.watts[1]
    record.temperature = float(round(29 + 46 * state.warmth))
    low, high = model.sm_clock
    record.sm_clock = round(low + (high - low) * min(1.0, 3 * load)) * 1e6
    record.memory_clock = model.memory_clock * 1e6
    record.clock_reasons = ["gpu_idle"] if load < IDLE else ["sw_power_cap"] * (load > BUSY)
    record.clock_reason_seconds = {"sw_power_cap": round(state.capped, 3)}
    record.answer = 0.004
    record.pcie_generation = record.pcie_generation_max = 4
    record.pcie_width = record.pcie_width_max = 16
    record.pcie_replays = 0
    if model.workstation:
        record.fan = round(0.3 + 0.4 * state.warmth, 2)
    else:
        record.ecc = {"corrected.dram": 0, "uncorrected.dram": 0}
    if model.capability >= VOLTA:
        record.energy = round(state.energy, 3)
    if model.capability >= AMPERE and not model.workstation:
        record.remapped = {"correctable": 0, "uncorrectable": 0}
        record.remap_pending = record.remap_failure = False
        record.recovery_action = 0
    if model.capability >= HOPPER:
        record.pcie_transmit = int(state.worked * 1400) * MIB
        record.pcie_receive = int(state.worked * 2300) * MIB
    if model.nvlinks:
        record.memory_temperature = record.temperature + 6
    if record.links:
        record.nvlink_transmit = record.nvlink_receive = int(state.worked * 41000) * MIB
        record.nvlink_errors = dict.fromkeys(("crc_data", "crc_flit", "recovery", "replay"), 0)
        record.nvlink_active = sum(record.links.values())


def fill_work(record: DeviceTelemetry, model: SimulatedModel, mean: float, seconds: float) -> None:
    """Say how busy a device was since the last look."""
    record.observed = min(seconds, OBSERVED)
    record.busy = record.observed * mean
    record.utilization = round(mean, 2)
    if model.capability >= HOPPER:
        shares = {"sm_active": 0.9, "sm_occupancy": 0.4, "tensor_active": 0.5, "dram_active": 0.6}
        record.gpm = {name: round(share * mean, 4) for name, share in shares.items()}
    if not record.parent:
        record.memory_utilization = round(0.5 * mean, 2)


def device_load(device: int, seconds: float) -> float:
    """Return how much of a device a job uses, 0 to 1, `seconds` after it was claimed."""
    middle, swing, period = WAVES[device % len(WAVES)]
    wave = middle + swing * math.sin(2 * math.pi * seconds / period)
    return wave * max(0.0, min(1.0, seconds / START))


def mean_device_load(device: int, since: float, until: float) -> float:
    """Return the mean of `device_load` between two moments, as far as the driver remembers."""
    begin = max(since, until - OBSERVED)
    return sum(device_load(device, begin + (until - begin) * at / 4) for at in range(5)) / 5


def memory_share(device: int, seconds: float) -> float:
    """Return which part of a device's memory a job uses."""
    return (0.4 + 0.07 * (device % 8)) * max(0.0, min(1.0, seconds / LOADING))
