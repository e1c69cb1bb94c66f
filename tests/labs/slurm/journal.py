# SPDX-License-Identifier: Apache-2.0
"""What jobs themselves say of their devices: a log that owes nothing to gpulock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path


@dataclass(frozen=True)
class Hold:
    """That a job had devices on a node from `start` to `end`; without an end it was killed."""

    job: int
    node: str
    devices: frozenset[str]
    start: float
    end: float


@dataclass(frozen=True)
class Journal:
    """A file to which jobs append when they begin and when they end."""

    path: Path

    def clear(self) -> None:
        """Make the file, empty and writable for every job owner."""
        self.path.write_text("")
        self.path.chmod(0o666)

    def around(self, lines: str = "") -> str:
        """Return a bash script that runs `lines` between its two entries."""
        return f"{self._line('start')}{lines}\n{self._line('end')}"

    def _line(self, word: str) -> str:
        told = "$EPOCHREALTIME $SLURM_JOB_ID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
        return f'echo "{word} {told}" >>{self.path}\n'

    def holds(self) -> list[Hold]:
        """Return every job's time with its devices, by its beginning."""
        return parse(self.path.read_text())


def parse(text: str) -> list[Hold]:
    """Return the holds of a journal; a start without an end has no duration."""
    open_: dict[tuple[str, str], tuple[float, frozenset[str]]] = {}
    found: list[Hold] = []
    for line in text.splitlines():
        word, time, job, node, *devices = line.split()
        if word == "start":
            names = frozenset(devices[0].split(",")) if devices else frozenset[str]()
            open_[job, node] = (float(time), names)
        elif (job, node) in open_:
            start, names = open_.pop((job, node))
            found.append(Hold(int(job), node, names, start, float(time)))
    for (job, node), (start, names) in open_.items():
        found.append(Hold(int(job), node, names, start, start))
    return sorted(found, key=lambda hold: hold.start)


def doubles(holds: Sequence[Hold]) -> list[str]:
    """Name every device that two jobs had at the same time."""
    return [
        f"{a.node} {','.join(sorted(shared))}: jobs {a.job} and {b.job}"
        for a, b in combinations(holds, 2)
        if a.node == b.node and a.start <= b.end and b.start <= a.end
        if (shared := a.devices & b.devices)
    ]
