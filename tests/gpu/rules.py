# SPDX-License-Identifier: Apache-2.0
"""Which metric is compared with which answer of nvidia-smi, how exactly, and why not closer.

Names are as in `scraped`. Every family of the exporter that is of a card is in RULES, in COUNTERS
or in OURS_ALONE: a test holds to it.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = float(1 << 20)


class Rule(NamedTuple):
    """A metric and the fields that say the same, the first that is known being asked.

    What nvidia-smi says times `scale` must lie between two scrapes around it, give or take
    `slack` and a `share` of it, in so large a part of the `rounds`. `bit` picks one of a mask.
    """

    metric: str
    fields: tuple[str, ...]
    why: str
    scale: float = 1.0
    slack: float = 0.0
    share: float = 0.0
    rounds: float = 1.0
    bit: int = 0


class Grown(NamedTuple):
    """A counter, of which only the growth within each phase is compared.

    The growth must be the integral of a field times `scale` over the time, or (without a field)
    the time itself, give or take a `share` of it and `slack` for each second.
    """

    metric: str
    fields: tuple[str, ...]
    why: str
    scale: float
    share: float
    slack: float


EXACT = "it is the same number of the driver, and changes seldom"
SLOW = "the exporter reads it every 5 s, nvidia-smi now"
INFO: dict[str, str] = {  # label of gpulock_gpu_info: field
    "name": "name",
    "pci_bus_id": "pci.bus_id",
    "driver_version": "driver_version",
    "gpu": "index",
    "mig_mode": "mig.mode.current",
    "persistence_mode": "persistence_mode",
}
_REASONS = {  # bits of nvmlClocksEventReasons; nvidia-smi counts the time of five of them
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_TIMED = (
    *("sw_power_cap", "sync_boost"),
    *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
)
_PLACES = {  # ours: nvidia-smi's
    **{"dram": "dram", "sram": "sram", "l1": "l1_cache", "l2": "l2_cache"},
    **{"register": "register_file", "texture": "texture_memory", "cbu": "cbu"},
}

RULES: tuple[Rule, ...] = (
    Rule(
        "utilization_ratio",
        ("utilization.gpu",),
        "both are of the driver's last 1/6 to 1 s, and ours is up to a second older",
        scale=0.01,
        slack=0.10,
        rounds=0.75,
    ),
    Rule(
        "memory_utilization_ratio",
        ("utilization.memory",),
        "as utilization_ratio",
        scale=0.01,
        slack=0.10,
        rounds=0.75,
    ),
    Rule(
        "memory_used_bytes",
        ("memory.used",),
        "nvidia-smi rounds to MiB, and is itself a client of the driver for a moment",
        scale=MIB,
        slack=8 * MIB,
        rounds=0.75,
    ),
    Rule(
        "memory_total_bytes",
        ("memory.total",),
        "nvidia-smi rounds to MiB",
        scale=MIB,
        slack=MIB,
    ),
    Rule(
        "power_watts",
        ("power.draw.instant", "power.draw"),
        "the sensor is good to 5 W (nvidia-smi), and the draw moves within a second",
        slack=15.0,
        share=0.10,
        rounds=0.75,
    ),
    Rule(
        "temperature_celsius",
        ("temperature.gpu",),
        "whole degrees, which may change between the two",
        slack=2.0,
        rounds=0.9,
    ),
    Rule(
        "sm_clock_hertz",
        ("clocks.sm", "clocks.current.sm"),
        "the clock moves by steps of 15 MHz all the time",
        scale=1e6,
        slack=30e6,
        share=0.05,
        rounds=0.75,
    ),
    Rule(
        "memory_clock_hertz",
        ("clocks.mem", "clocks.current.memory"),
        "it changes when a load begins or ends",
        scale=1e6,
        slack=1e6,
        share=0.01,
        rounds=0.75,
    ),
    *(
        Rule(
            f"clock_event_active {name}",
            ("clocks_event_reasons.active",),
            "a reason comes and goes within a second",
            rounds=0.75,
            bit=bit,
        )
        for bit, name in _REASONS.items()
    ),
    *(
        Rule(
            *(f"clock_event_seconds_total {name}", (f"clocks_event_reasons_counters.{name}",)),
            SLOW,
            scale=1e-6,
            slack=7.0,
            share=0.02,
            rounds=0.9,
        )
        for name in _TIMED
    ),
    *(
        Rule(f"ecc_errors_total {place} {kind}", (f"ecc.errors.{kind}.volatile.{field}",), EXACT)
        for kind in ("corrected", "uncorrected")
        for place, field in _PLACES.items()
    ),
    Rule("power_limit_watts", ("power.limit",), SLOW, slack=1.0),
    Rule("power_limit_enforced_watts", ("enforced.power.limit",), SLOW, slack=1.0),
    Rule("memory_temperature_celsius", ("temperature.memory",), SLOW, slack=4.0, rounds=0.9),
    Rule("pcie_generation_max", ("pcie.link.gen.max",), EXACT),
    Rule("pcie_width_lanes", ("pcie.link.width.current",), EXACT),
    Rule("pcie_width_max_lanes", ("pcie.link.width.max",), EXACT),
    Rule("fan_ratio", ("fan.speed",), SLOW, scale=0.01, slack=0.1, rounds=0.75),
    Rule("remapped_rows correctable", ("remapped_rows.correctable",), EXACT),
    Rule("remapped_rows uncorrectable", ("remapped_rows.uncorrectable",), EXACT),
    Rule("remapped_rows_pending", ("remapped_rows.pending",), EXACT),
    Rule("remapped_rows_failure", ("remapped_rows.failure",), EXACT),
    Rule("recovery_action", ("gpu_recovery_action",), EXACT),
)
# what nvidia-smi counts only where the hardware counts it, and says 0 or nothing elsewhere
OFTEN_ONE_SIDED = frozenset(
    {
        f"ecc_errors_total {place} {kind}"
        for place in _PLACES
        if place not in {"dram", "sram"}
        for kind in ("corrected", "uncorrected")
    }
)
COUNTERS: tuple[Grown, ...] = (
    Grown(
        "busy_seconds_total",
        ("utilization.gpu",),
        "nvidia-smi looks once a second at what the driver's buffer has without gaps",
        scale=0.01,
        share=0.05,
        slack=0.05,
    ),
    Grown(
        "observed_seconds_total",
        (),
        "the buffer comes late by up to a second; an idle card may have none",
        1.0,
        0.10,
        0.0,
    ),
    Grown(
        "energy_joules_total",
        ("power.draw", "power.draw.instant"),
        "the sensor looks a part of the time on some cards (arXiv 2312.02741)",
        scale=1.0,
        share=0.15,
        slack=5.0,
    ),
)
# family: why nvidia-smi cannot be asked
OURS_ALONE: dict[str, str] = {
    "last_busy_timestamp_seconds": "what gpulock saw; follows busy_seconds_total",
    "xid_errors_total": "nvidia-smi does not tell of XIDs; the kernel's log does",
    "xid_last_timestamp_seconds": "as xid_errors_total",
    "pcie_generation": "it moves with the load, and the exporter reads it every 5 s",
    "pcie_replays_total": "nvidia-smi -q tells it in no query",
    "nvlink_errors_total": "nvidia-smi nvlink -e tells them by link, in no query",
    "nvlink_active_links": "likewise, nvidia-smi nvlink -s",
    "fabric_state": "nvidia-smi -q prints it in words, in no query",
    "driver_answer_seconds": "the exporter's own calls",
    "pcie_transmit_bytes_total": "nvidia-smi tells a rate of 20 ms, no counter",
    "pcie_receive_bytes_total": "as pcie_transmit_bytes_total",
    "nvlink_transmit_bytes_total": "of links that nothing uses here; `nvidia-smi nvlink -gt d`",
    "nvlink_receive_bytes_total": "as nvlink_transmit_bytes_total",
    "sm_active_ratio": "GPM, on a window that nvidia-smi does not share",
    "sm_occupancy_ratio": "as sm_active_ratio",
    "tensor_active_ratio": "as sm_active_ratio; the load uses none",
    "dram_active_ratio": "as sm_active_ratio; the load hardly uses it",
    "health": "gpulockd's",
    "lock_info": "the locks'",
    "locked": "the locks'",
    "lock_acquired_timestamp_seconds": "the locks'",
    "lock_stale": "the locks'",
    "quarantined": "the locks'",
    "quarantine_info": "the locks'",
    "missing": "the locks'",
    "responding": "whether a call came back",
}
PROCESSES = Rule(
    "foreign_processes",
    (),
    "nothing is locked here, so all that computes is foreign but for services and what cannot be "
    "seen; the lists are read every second",
    rounds=0.75,
)
EVERY: tuple[str, ...] = tuple(
    dict.fromkeys(
        field
        for part in (
            *(rule.fields for rule in RULES),
            *(rule.fields for rule in COUNTERS),
            INFO.values(),
        )
        for field in part
    )
)
