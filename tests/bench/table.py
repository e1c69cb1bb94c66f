# SPDX-License-Identifier: Apache-2.0
"""The bench's output: medians, ratios, and whether each target was met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Target = tuple[str, float, float]  # what, found, limit
WIDTHS = (8, 8, 8, 9, 9, 8, 9)
ROWS = (
    "true",
    "floor",
    "prolog imports",
    "prolog",
    "prolog+launch",
    "prolog main()",
    "shell prolog",
    "epilog imports",
    "epilog, alone",
    "epilog",
    "epilog+launch",
    "epilog main()",
    "shell epilog",
    "slurm prolog imports",
    "slurm prolog",
    "slurm prolog, counted",
    "slurm prolog main()",
    "slurm task imports",
    "slurm task",
    "slurm task main()",
    "slurm epilog imports",
    "slurm epilog, alone",
    "slurm epilog",
    "slurm epilog main()",
)
NAME = 22  # columns
# row, what it is compared with, limit
HOOK_TARGETS = (
    ("prolog", "floor", 1.45),
    ("prolog", "shell prolog", 1.0),
    ("epilog, alone", "floor", 1.45),
    ("slurm prolog", "floor", 1.45),
    ("slurm task", "floor", 1.45),
    ("slurm epilog, alone", "floor", 1.45),
)
WAITED = 1.4  # times its processor time: on an idle machine a program takes 1.1 to 1.2


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which so large a share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def print_hooks(samples: dict[str, list[float]], interpreter: str) -> None:
    """Print one row a program: median, quartiles, ratio to the floor; processor time likewise."""
    floor_cpu = statistics.median(samples["floor cpu"])
    floor = statistics.median(samples["floor"])
    print(f"whole processes, ms, {len(samples['floor'])} rounds; floor: {interpreter} -IS -c pass")
    heads = ("median", "p25", "p75", "x floor", "- floor", "cpu", "x floor")
    print(" " * (NAME + 2) + "".join(f"{head:>{width}}" for head, width in zip(heads, WIDTHS)))
    for name in ROWS:
        values = samples[name]
        low, middle, high = (quantile(values, share) for share in (0.25, 0.5, 0.75))
        print(
            f"  {name:{NAME}}{middle:8.2f}{low:8.2f}{high:8.2f}"
            f"{middle / floor:9.2f}{middle - floor:9.2f}" + cpu_columns(samples, name, floor_cpu)
        )


def cpu_columns(samples: dict[str, list[float]], name: str, floor: float) -> str:
    """Return the columns of processor time, blank where it was not measured."""
    if f"{name} cpu" not in samples:
        return ""
    middle = statistics.median(samples[f"{name} cpu"])
    return f"{middle:8.2f}{middle / floor:9.2f}"


def print_inside(title: str, rows: dict[str, list[float]]) -> None:
    """Print one row an act, in microseconds."""
    print(f"\n{title}")
    print(f"  {'':28}{'p50 us':>10}{'p99 us':>10}{'rounds':>8}")
    for name, values in rows.items():
        middle, high = quantile(values, 0.5) * 1000, quantile(values, 0.99) * 1000
        print(f"  {name:28}{middle:10.0f}{high:10.0f}{len(values):8}")


def print_targets(targets: Sequence[Target]) -> int:
    """Print MET or MISSED for each (what, found, limit); return how many were missed."""
    print("\ntargets")
    for what, found, limit in targets:
        word = "MET   " if found <= limit else "MISSED"
        print(f"  {word}  {what}: {found:.2f}, limit {limit:.2f}")
    return len([what for what, found, limit in targets if found > limit])


def hook_targets(samples: dict[str, list[float]]) -> list[Target]:
    """Return the targets of the hooks: ratios of medians.

    Of time, as a job waits for it. Where even the floor mostly waited for a processor, a longer
    program waited more often than its share: then of processor time, and each target says so.
    """
    middle = {name: statistics.median(values) for name, values in samples.items()}
    busy = middle["floor"] > WAITED * middle["floor cpu"]
    kind, of = (" cpu", ", processor time: the machine is busy") if busy else ("", "")
    return [
        (f"{row} / {base}{of}", middle[f"{row}{kind}"] / middle[f"{base}{kind}"], limit)
        for row, base, limit in HOOK_TARGETS
    ]


def claim_targets(rows: dict[str, list[float]], bare: str) -> list[Target]:
    """Return the targets of claim and release within a process: ratios."""
    whole = rows["claim + release"]
    middle = quantile(whole, 0.5)
    return [
        (f"claim + release / {bare}", middle / quantile(rows[bare], 0.5), 2.5),
        ("claim + release, p99 / p50", quantile(whole, 0.99) / middle, 2.0),
    ]
