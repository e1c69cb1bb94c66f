# SPDX-License-Identifier: Apache-2.0
"""Nodes as the landing page may have to show them."""

from __future__ import annotations

import math
from dataclasses import replace

from gpulock_exporter.web.page import GIB, STATES, Page, Tile

H200 = "NVIDIA H200"
LONG = "maximiliane.von-und-zu-hohenstaufen@physics.research.example.org"
NOTES = {
    "held_idle": "observed to do nothing for 1h 3m",
    "foreign": "2 foreign processes",
    "stale": "the owner's shepherd 4711 is gone",
    "unknown": "a claim is being made",
    "quarantined": "ECC: 3 uncorrected errors in DRAM since Friday, do not use (root)",
    "missing": "expected, but not there",
}


def wave(number: int, base: float, size: float) -> list[float | None]:
    """Return minutes of work, not observed for a while in the middle."""
    found = [base + size * math.sin(n / (4 + number)) for n in range(100)]
    return [None if 40 <= n < 48 else min(1.0, max(0.0, one)) for n, one in enumerate(found)]


def card(number: int, state: str) -> Tile:
    """Return a card in a state."""
    if state == "missing":
        return Tile(str(number), "", state, bus(number), note=NOTES[state])
    held = state in ("held", "held_idle", "stale")
    works = state in ("held", "foreign")
    return Tile(
        str(number),
        H200,
        state,
        bus(number),
        job=f"job {4711234 + number}.{number}" if held else "",
        user=(LONG if state == "stale" else "alice") if held else "",
        held="2d 4h" if held else "",
        note=NOTES.get(state, ""),
        warnings=("XID 79 (GPU has fallen off the bus), 2h 5m ago", "97 °C is hot") * (number % 2),
        mean=0.45 if held else None,
        utilization=0.97 if works else 0.0,
        history=wave(number, 0.75, 0.3) if works else [0.0] * 100,
        memory_used=(17 * number + 3) * GIB if held or works else 0,
        memory_total=141 * GIB,
        temperature=34.0 + 4 * number,
        power=611.0 if works else 75.0,
    )


def bus(number: int) -> str:
    """Return a bus id."""
    return f"0000:{0x1A + 17 * number:02x}:00.0"


def instance(gpu: int, number: int, profile: str, state: str) -> Tile:
    """Return a MIG instance; on an A100 nobody can tell whether it works."""
    held = state == "held"
    return Tile(
        f"gi{number}.ci0",
        profile,
        state,
        f"{bus(gpu)}.gi{number}.ci0",
        job=f"job {900 + number}" if held else "",
        user=LONG if held and number == 1 else "bob" if held else "",
        held="12m" if held else "",
        card=f"GPU {gpu} NVIDIA A100-SXM4-80GB",
        memory_used=3 * GIB if held else 0,
        memory_total=10 * GIB,
    )


def scenes() -> dict[str, Page]:
    """Return the pages by name."""
    cards = [card(number, state) for number, state in enumerate(STATES)]
    busy = [card(number, "held" if number % 3 else "free") for number in range(8)]
    parts = [
        instance(gpu, number, "1g.10gb", "held" if number % 2 else "free")
        for gpu in range(2)
        for number in range(1, 8)
    ]
    dark = [replace(one, utilization=None, history=[], memory_used=None) for one in busy]
    dark = [replace(one, temperature=None, power=None) for one in dark]
    node = "gpu017.cluster.example.org"
    return {
        "states": Page(node, "0.1.0", cards, driver="580.95.05"),
        "busy": Page("gpu017", "0.1.0", busy, driver="580.95.05"),
        "mig": Page("gpu018", "0.1.0", [*parts, card(2, "held")], driver="535.183.01"),
        "old": Page("gpu019", "0.1.0", dark, 754.0, 10.0, "the driver has not answered for 751 s"),
        "none": Page("login1", "0.1.0"),
        "begin": Page("gpu020", "0.1.0", dark[:2], None, 10.0),
    }
