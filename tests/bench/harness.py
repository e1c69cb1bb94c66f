# SPDX-License-Identifier: Apache-2.0
"""Rounds in shuffled order, medians, ratios and targets: what a bench is made of.

All rows of a bench come from one run: what else this machine does falls on each of them alike.
What disturbs a measurement is undone, tried again, counted and printed.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from tests.support.scene import folder

WARM_UP = 3  # rounds that are not counted
CPU = " cpu"  # ends the name of a row of processor time, which other work disturbs less
WAITED = 1.4  # times its processor time: on an idle machine a program takes 1.1 to 1.2
TRIES = 10
Samples = dict[str, list[float]]  # milliseconds by row
Act = Callable[[], None]
Result = TypeVar("Result")
DISTURBED: Counter[str] = Counter()  # why something was measured again, and how often


class Target(NamedTuple):
    """A value that must not exceed its limit."""

    what: str
    value: float
    limit: float


def run_bench(name: str, measure: Callable[[Path], Sequence[Target]]) -> int:
    """Measure in a folder in memory; return 1 where a target is missed or cannot be measured."""
    try:
        with folder(f"bench-{name}") as root:
            targets = measure(root)
    except (RuntimeError, OSError, subprocess.SubprocessError) as fault:
        print(f"bench: cannot measure: {fault}", file=sys.stderr)
        return 1
    for said, count in DISTURBED.most_common():
        print(f"disturbed, and measured again {count} x: {said}")
    return 1 if count_missed(targets) else 0


def run_rounds(acts: Sequence[Act], samples: Samples, rounds: int, restore: Act) -> None:
    """Do every act once a round, each round in another order; `restore` runs before each."""
    order, mixed = random.Random(1), list(acts)
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            samples.clear()
        order.shuffle(mixed)
        for act in mixed:
            lengths = {row: len(values) for row, values in samples.items()}

            def undo(before: Mapping[str, int] = lengths) -> None:
                for row, values in samples.items():
                    del values[before.get(row, 0) :]
                restore()

            restore()
            undisturbed(act, undo)


def undisturbed(act: Callable[[], Result], undo: Act) -> Result:
    """Return what `act` returns; where it raises RuntimeError undo it, and try again.

    Raises RuntimeError, with what else runs here, when it failed so many times.
    """
    said = ""
    for _ in range(TRIES):
        try:
            return act()
        except RuntimeError as fault:
            said = str(fault)
            DISTURBED[said] += 1
            undo()
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    raise RuntimeError(f"{said}, {TRIES} times running; {load}, {len(Proc().pids())} processes")


def take_locks_away(node: Node) -> None:
    """Leave neither a lock nor a record on a node, nor what is finished."""
    store = node.store
    for directory in map(Path, (store.locks_dir, store.claims_dir, store.finished_dir)):
        for path in directory.iterdir() if directory.is_dir() else ():
            shutil.rmtree(path)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which so large a share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """Return the middle value."""
    return quantile(values, 0.5)


def print_rows(title: str, samples: Samples, base: str) -> None:
    """Print the quantiles of each row; ratios to the median of `base`; processor time likewise."""
    heads = ("p25", "median", "p75", "p99", "ratio", "cpu", "ratio")
    print(f"\n{title}, ms\n{'':34}" + "".join(f"{head:>9}" for head in heads))
    for row, values in samples.items():
        if row.endswith(CPU):
            continue
        worked = median(samples[row + CPU])
        columns = [quantile(values, share) for share in (0.25, 0.5, 0.75, 0.99)]
        columns.append(median(values) / median(samples[base]))
        columns += [worked, worked / median(samples[base + CPU])]
        print(f"  {row:32}" + "".join(f"{value:9.2f}" for value in columns))


def ratio_target(samples: Samples, row: str, base: str, limit: float) -> Target:
    """Return the target of a ratio of medians: of time, as a job waits for it.

    Where even `base` mostly waited for a processor, a longer program waited more often than its
    share: then of processor time, and the target says so.
    """
    busy = median(samples[base]) > WAITED * median(samples[base + CPU])
    kind, why = (CPU, ", processor time: the machine is busy") if busy else ("", "")
    ratio = median(samples[row + kind]) / median(samples[base + kind])
    return Target(f"{row} / {base}{why}", ratio, limit)


def count_missed(targets: Sequence[Target]) -> int:
    """Print MET or MISSED for each target; return how many were missed."""
    print("\ntargets" if targets else "")
    for what, value, limit in targets:
        word = "MET   " if value <= limit else "MISSED"
        print(f"  {word}  {what}: {value:.2f}, limit {limit:.2f}")
    return len([1 for _, value, limit in targets if value > limit])
