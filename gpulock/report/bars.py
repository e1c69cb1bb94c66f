# SPDX-License-Identifier: Apache-2.0
"""Bars and lines of a terminal, and how bytes and joules are said; pure.

In ASCII alone: a job's output file is read by whatever its owner likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpulock.report.claims import UseTimeline

GIB: Final = 1 << 30
WATT_HOUR, KILOWATT_HOUR = 3600.0, 3_600_000.0  # joules
FULL: Final = "#"
EMPTY: Final = "."
LEVELS: Final = "_.-=+*%#"  # of a line from 0 to 1
COLUMNS: Final = 60  # of a line of use over time: with its label it fits into 80


def draw_bar(share: float | None, width: int) -> str:
    """Return a bar; what is not nothing shows."""
    if share is None:
        return " " * width
    share = min(1.0, max(0.0, share))
    full = round(share * width)
    if share > 0:
        full = max(1, full)
    if share < 1:
        full = min(width - 1, full)
    return FULL * full + EMPTY * (width - full)


def draw_sparkline(values: Sequence[float | None]) -> str:
    """Return one character a value, a blank for what is not known; what is not 0 shows."""
    top = len(LEVELS) - 1
    levels = [
        None if value is None else max(int(value > 0), round(min(1.0, max(0.0, value)) * top))
        for value in values
    ]
    return "".join([" " if level is None else LEVELS[level] for level in levels])


def resample_use(
    shape: UseTimeline | None, held: float, columns: int = COLUMNS
) -> tuple[list[float | None], float]:
    """Return the mean use in each column up to the end, and the seconds that a column stands for.

    A claim goes on where its buckets end: that time was not observed.
    """
    if shape is None:
        return [], 0.0
    use, width = list(shape.use), shape.width
    while held > columns * width or len(use) > columns:
        use, width = average_value_pairs(use), width * 2
    return use + [None] * (round(held / width) - len(use)), width


def average_value_pairs(values: Sequence[float | None]) -> list[float | None]:
    """Return the mean of each two neighbours, as far as they are known; the last may be alone."""
    found: list[float | None] = []
    for place in range(0, len(values), 2):
        both = [value for value in values[place : place + 2] if value is not None]
        found.append(sum(both) / len(both) if both else None)
    return found


def format_memory_peak(peak: int | None, total: int | None) -> str:
    """Return `12.1 of 80 GiB`, or what of it is known."""
    if peak is None:
        return "-"
    return f"{format_gib(peak)}{f' of {format_gib(total)}' if total else ''} GiB"


def format_gib(size: int) -> str:
    """Return bytes in GiB: three digits say enough."""
    value = size / GIB
    digits = 2 if value < 1 else 1 if value < 10 else 0  # noqa: PLR2004 (of a number's length)
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits and value else text


def format_energy(joules: float | None) -> str:
    """Return `512 J`, `12.3 Wh` or `1.23 kWh`."""
    if joules is None:
        return "-"
    if joules < WATT_HOUR:
        return f"{joules:.0f} J"
    if joules < KILOWATT_HOUR:
        return f"{joules / WATT_HOUR:.1f} Wh"
    return f"{joules / KILOWATT_HOUR:.2f} kWh"
