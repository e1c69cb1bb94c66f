# SPDX-License-Identifier: Apache-2.0
"""Which metric is compared with which answer of nvidia-smi, how exactly, and why not closer.

Names are those of `compare.parse_cards`. Every family of the exporter that is of a card is in RULES
or in OURS_ALONE: a test holds to it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tests.gpu.smi import PROCESSES

MIB = float(1 << 20)
EXACT = "it is the same number of the driver, and changes seldom"
SLOW = "the exporter reads it every 5 s, nvidia-smi now"


class Rule(NamedTuple):
    """A metric and the fields that say the same, the first that is known being asked.

    What nvidia-smi says times `scale` must lie between two scrapes around it, give or take `slack`
    and a `share` of it, in so large a part of the `rounds`. `bit` picks one of a mask. A counter
    `grows` within each phase by the area below the field (without a field by the time), give or
    take a `share` of it and `slack` for each second. `one_sided` says what is no difference where
    one side alone has a value: a zero, or that it is not ours.
    """

    metric: str
    fields: tuple[str, ...]
    why: str = EXACT
    scale: float = 1.0
    slack: float = 0.0
    share: float = 0.0
    rounds: float = 1.0
    bit: int = 0
    grows: bool = False
    one_sided: Literal["", "zero", "not ours"] = ""


INFO = {  # label of gpulock_gpu_info: field
    "name": "name",
    "pci_bus_id": "pci.bus_id",
    "driver_version": "driver_version",
    "gpu": "index",
    "mig_mode": "mig.mode.current",
    "persistence_mode": "persistence_mode",
}
_REASONS = (  # by their bits in nvmlClocksEventReasons; nvidia-smi counts the time of five of them
    *("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost"),
    *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
    "display_clock_setting",
)
_TIMED = (
    *("sw_power_cap", "sync_boost"),
    *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
)
_PLACES = {  # ours: nvidia-smi's
    **{"dram": "dram", "sram": "sram", "l1": "l1_cache", "l2": "l2_cache"},
    **{"register": "register_file", "texture": "texture_memory", "cbu": "cbu"},
}
_DRIVERS = "both are of the driver's last 1/6 to 1 s, and ours is up to a second older"
_DRAW = "the sensor is good to 5 W (nvidia-smi), and the draw moves within a second"
_USED = "nvidia-smi rounds to MiB, and is itself a client of the driver for a moment"
_SENSOR = "the sensor looks a part of the time on some cards (arXiv 2312.02741)"
_BUFFER = "nvidia-smi looks once a second at what the driver's buffer has without gaps"
_LATE = "the buffer comes late by up to a second; an idle card may have none"
_ACTIVE, _TIME = "clocks_event_reasons.active", "clocks_event_reasons_counters"
_BRIEF = "a reason comes and goes within a second"
_UNSEEN = "nothing is locked here, so all that computes is foreign but for what cannot be seen"
RULES = (
    Rule("utilization_ratio", ("utilization.gpu",), _DRIVERS, 0.01, 0.10, rounds=0.75),
    Rule("memory_utilization_ratio", ("utilization.memory",), _DRIVERS, 0.01, 0.10, rounds=0.75),
    Rule("memory_used_bytes", ("memory.used",), _USED, MIB, 8 * MIB, rounds=0.75),
    Rule("memory_total_bytes", ("memory.total",), "nvidia-smi rounds to MiB", MIB, MIB),
    Rule("power_watts", ("power.draw.instant", "power.draw"), _DRAW, 1.0, 15.0, 0.10, 0.75),
    Rule("temperature_celsius", ("temperature.gpu",), "whole degrees", slack=2.0, rounds=0.9),
    Rule("sm_clock_hertz", ("clocks.sm",), "it moves by steps of 15 MHz", 1e6, 30e6, 0.05, 0.75),
    Rule("memory_clock_hertz", ("clocks.mem",), "it moves with the load", 1e6, 1e6, 0.01, 0.75),
    *(
        Rule(f"clock_event_active {name}", (_ACTIVE,), _BRIEF, rounds=0.75, bit=1 << number)
        for number, name in enumerate(_REASONS)
    ),
    *(
        Rule(f"clock_event_seconds_total {name}", (f"{_TIME}.{name}",), SLOW, 1e-6, 7.0, 0.02, 0.9)
        for name in _TIMED
    ),
    *(
        Rule(
            f"ecc_errors_total {place} {kind}",
            (f"ecc.errors.{kind}.volatile.{field}",),
            # elsewhere nvidia-smi counts only where the hardware does, and says 0 or nothing
            one_sided="" if place in {"dram", "sram"} else "zero",
        )
        for kind in ("corrected", "uncorrected")
        for place, field in _PLACES.items()
    ),
    Rule("power_limit_watts", ("power.limit",), SLOW, slack=1.0),
    Rule("power_limit_enforced_watts", ("enforced.power.limit",), SLOW, slack=1.0),
    Rule("memory_temperature_celsius", ("temperature.memory",), SLOW, slack=4.0, rounds=0.9),
    Rule("pcie_generation_max", ("pcie.link.gen.max",)),
    Rule("pcie_width_lanes", ("pcie.link.width.current",)),
    Rule("pcie_width_max_lanes", ("pcie.link.width.max",)),
    Rule("fan_ratio", ("fan.speed",), SLOW, 0.01, 0.1, rounds=0.75),
    Rule("remapped_rows correctable", ("remapped_rows.correctable",)),
    Rule("remapped_rows uncorrectable", ("remapped_rows.uncorrectable",)),
    Rule("remapped_rows_pending", ("remapped_rows.pending",)),
    Rule("remapped_rows_failure", ("remapped_rows.failure",)),
    Rule("recovery_action", ("gpu_recovery_action",)),
    Rule("foreign_processes", (PROCESSES,), _UNSEEN, rounds=0.75, one_sided="not ours"),
    Rule("busy_seconds_total", ("utilization.gpu",), _BUFFER, 0.01, 0.05, 0.05, grows=True),
    Rule("observed_seconds_total", (), _LATE, 1.0, 0.0, 0.10, grows=True),
    Rule("energy_joules_total", ("power.draw",), _SENSOR, 1.0, 5.0, 0.15, grows=True),
)
_GPM = "GPM, on a window that nvidia-smi does not share"
_LOCKS = "gpulock's own"
OURS_ALONE = {  # family: why nvidia-smi cannot be asked
    "last_busy_timestamp_seconds": "what gpulock saw; follows busy_seconds_total",
    **dict.fromkeys(("xid_errors_total", "xid_last_timestamp_seconds"), "the kernel's log has it"),
    "pcie_generation": "it moves with the load, and the exporter reads it every 5 s",
    **dict.fromkeys(("pcie_replays_total", "fabric_state"), "nvidia-smi -q, in no query"),
    **dict.fromkeys(("nvlink_errors_total", "nvlink_active_links"), "nvidia-smi nvlink -e, -s"),
    "driver_answer_seconds": "the exporter's own calls",
    **dict.fromkeys(
        ("pcie_transmit_bytes_total", "pcie_receive_bytes_total"), "nvidia-smi has a rate of 20 ms"
    ),
    **dict.fromkeys(
        ("nvlink_transmit_bytes_total", "nvlink_receive_bytes_total"), "nothing uses a link here"
    ),
    **dict.fromkeys(("sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio"), _GPM),
    "dram_active_ratio": _GPM,
    **dict.fromkeys(("health", "lock_info", "locked", "lock_acquired_timestamp_seconds"), _LOCKS),
    **dict.fromkeys(("lock_stale", "quarantined", "quarantine_info", "missing"), _LOCKS),
    "responding": "whether a call came back",
}
ASKED = tuple(
    dict.fromkeys(
        field
        for fields in (*(rule.fields for rule in RULES), tuple(INFO.values()))
        for field in fields
        if field != PROCESSES
    )
)
