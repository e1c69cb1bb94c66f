# SPDX-License-Identifier: Apache-2.0
"""The bench's output: medians, ratios, and whether each target was met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

ROWS = (
    "true",
    "floor",
    "prolog imports",
    "prolog",
    "prolog+launch",
    "prolog main()",
    "shell prolog",
    "epilog imports",
    "epilog",
    "epilog+launch",
    "epilog main()",
    "shell epilog",
)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which so large a share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def print_hooks(samples: dict[str, list[float]], interpreter: str) -> None:
    """Print one row a program: median, quartiles, ratio to the floor."""
    floor = statistics.median(samples["floor"])
    print(f"whole processes, ms, {len(samples['floor'])} rounds; floor: {interpreter} -IS -c pass")
    print(f"  {'':16}{'median':>8}{'p25':>8}{'p75':>8}{'x floor':>9}{'- floor':>9}")
    for name in ROWS:
        values = samples[name]
        middle = statistics.median(values)
        print(
            f"  {name:16}{middle:8.2f}{quantile(values, 0.25):8.2f}{quantile(values, 0.75):8.2f}"
            f"{middle / floor:9.2f}{middle - floor:9.2f}"
        )
