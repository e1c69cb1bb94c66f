# SPDX-License-Identifier: Apache-2.0
"""What real cards answer when idle, as keys of the double's control file.

A key that is not here is what the card does not support. Sources: `nvidia-smi -q` of these cards
as people published it: H200 (driver 590) and RTX 4080 SUPER (595) in the captures of
utkuozdemir/nvidia_gpu_exporter; K80 and V100 in NVIDIA/nvidia-docker issues 809, 1226, 914 and
1076; A100 in NVIDIA's data sheets and MIG user guide. The RTX 4090 is the 4080 SUPER with the
memory, clocks and limits of its data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_EVERY = {
    "persistence": "1",
    "compute_mode": "0",
    "processes": "none",
    "utilization.gpu": "0",
    "utilization.memory": "0",
    "utilization.encoder": "0",
    "utilization.decoder": "0",
    "memory.used": "0",
    "bar1.total": "32G",
    "bar1.used": "1M",
    "clocks.reasons": "1",
    "pcie.generation.max": "3",
    "pcie.generation": "3",
    "pcie.width.max": "16",
    "pcie.width": "16",
    "pcie.replays": "0",
    "pcie.replays.rollover": "0",
}
# From Maxwell on.
_NEWER = {
    "process_utilization": "none",
}
_NVLINK_ERRORS = {
    f"nvlink.errors.{kind}": "0" for kind in ("crc_flit", "crc_data", "replay", "recovery")
}
_VIOLATIONS = {
    f"violation.{name}": "0"
    for name in (
        *("power", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability"),
        *("application_clocks", "base_clocks"),
    )
}
_MODERN = {**_EVERY, **_NEWER, **_VIOLATIONS, "utilization.jpeg": "0", "utilization.ofa": "0"}


def _ecc(*locations: str) -> dict[str, str]:
    kinds = [
        f"ecc.{c}.{e}" for c in ("volatile", "aggregate") for e in ("corrected", "uncorrected")
    ]
    return {
        **{"ecc.mode": "1", "ecc.mode.pending": "1"},
        **{f"{kind}{part}": "0" for kind in kinds for part in ("", *(f".{x}" for x in locations))},
    }


_OLD_ECC = {
    **_ecc("dram", "register", "l1", "l2", "texture"),
    **{"retired.pending": "0"},
    **{"retired.sbe.count": "0", "retired.dbe.count": "0"},
}
_NEW_ECC = {
    **_ecc("dram", "sram"),
    **{f"remapped.{name}": "0" for name in ("correctable", "uncorrectable", "pending", "failure")},
}


def _power(draw: int, limit: int, least: int, most: int) -> dict[str, str]:
    """Return the keys of power, from watts."""
    same = dict.fromkeys(("power.limit", "power.limit.default", "power.limit.enforced"), limit)
    draws = dict.fromkeys(("power", "power.instant"), draw)
    watts = {**same, **draws, "power.limit.min": least, "power.limit.max": most}
    return {key: str(1000 * value) for key, value in watts.items()}


def _clocks(now: str) -> dict[str, str]:
    """Return the keys of clocks, given as `graphics/memory/video` in MHz."""
    graphics, memory, video = now.split("/")
    return {f"clock.{name}": graphics for name in ("graphics", "sm")} | {
        "clock.memory": memory,
        "clock.video": video,
    }


_K80 = {
    **_EVERY,
    **_OLD_ECC,
    **_power(30, 149, 100, 175),
    **_clocks("324/324/405"),
    **{"pstate": "8", "temperature": "36"},
    **{"pci.device_id": "0x102D10DE", "pci.subsystem_id": "0x106C10DE"},
}
_V100 = {
    **_EVERY,
    **_NEWER,
    **_VIOLATIONS,
    **_OLD_ECC,
    **_power(43, 300, 150, 300),
    **_clocks("135/877/555"),
    **{"pstate": "0"},
    **{"temperature": "34", "temperature.memory": "33"},
    **{"ecc.volatile.uncorrected.cbu": "0"},
    **{"pci.device_id": "0x1DB510DE", "pci.subsystem_id": "0x124910DE"},
    **{"memory.reserved": "270M"},
    **_NVLINK_ERRORS,
    **{"nvlink.count": "6", "nvlink.*.state": "1", "nvlink.*.version": "2"},
    **{"nvlink.*.speed": "25781"},
}
_A100 = {
    **_MODERN,
    **_NEW_ECC,
    **_power(62, 400, 100, 400),
    **_clocks("210/1593/585"),
    **{"pstate": "0"},
    **{"temperature": "31", "temperature.memory": "42"},
    **{"memory.reserved": "634M"},
    **{"pci.device_id": "0x20B210DE", "pci.subsystem_id": "0x147F10DE"},
    **{"pcie.generation.max": "4", "pcie.generation": "4"},
    **{"mig.mode": "0", "mig.mode.pending": "0", "mig.max": "7"},
    **_NVLINK_ERRORS,
    **{"nvlink.count": "12", "nvlink.*.state": "1", "nvlink.*.version": "4"},
    **{"nvlink.*.speed": "25000"},
}
_H200 = {
    **_MODERN,
    **_NEW_ECC,
    **_power(77, 700, 200, 700),
    **_clocks("345/3201/765"),
    **{"power": "77670", "power.average": "77670", "power.instant": "77880"},
    **{"power.average.memory": "46560"},
    **{"pstate": "0"},
    **{"memory.reserved": "614M"},
    **{"temperature": "28", "temperature.memory": "32"},
    **{"temperature.limit.shutdown": "-8", "temperature.limit.slowdown": "-2"},
    **{"temperature.limit.gpu_max": "0", "temperature.limit.memory_max": "0"},
    **{"pci.device_id": "0x233510DE", "pci.subsystem_id": "0x18BE10DE"},
    **{"pcie.generation.max": "5", "pcie.generation": "5"},
    **{"mig.mode": "0", "mig.mode.pending": "0", "mig.max": "7"},
    **_NVLINK_ERRORS,
    **{"nvlink.count": "18", "nvlink.*.state": "1", "nvlink.*.version": "6"},
    **{"nvlink.*.speed": "26562"},
    **{"gpm": "1", **{f"gpm.{n}": "0" for n in (*range(1, 14), 20, 21, 60, 61)}},
}
_RTX_4090 = {
    **_MODERN,
    **_power(26, 450, 150, 600),
    **_clocks("210/405/1185"),
    **{"power.average": "26000"},  # an average is there from Ampere on, but not of GA100
    **{"persistence": "0", "pstate": "8", "fan.0": "0"},
    **{"temperature": "43"},
    **{"memory.reserved": "480M"},
    **{"ecc.mode": "0", "ecc.mode.pending": "0"},
    **{"pci.device_id": "0x268410DE", "pci.subsystem_id": "0x51101462"},
    **{"pcie.generation.max": "4", "pcie.generation": "1"},
}

CARDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Tesla K80": _K80,
        "Tesla V100-SXM2-32GB": _V100,
        "Tesla V100-SXM3-32GB": {**_V100, **_power(50, 350, 150, 350)},
        "NVIDIA A100-SXM4-80GB": _A100,
        "NVIDIA H200": _H200,
        "NVIDIA GeForce RTX 4090": _RTX_4090,
    }
)

# Keys that only the library of this branch and newer answers (CUDA's headers, see drivers.py).
NEWER_KEYS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        535: ("power.instant", "power.average", "power.average.memory"),
        555: ("pcie.tx_bytes", "pcie.rx_bytes"),
        570: ("recovery_action",),
        575: ("violation.sw_thermal", "violation.hw_thermal", "violation.hw_power_brake"),
    }
)
WITHOUT_COUNTERS = ("Tesla K80",)  # no energy, no bytes over PCIe: those came with Volta
