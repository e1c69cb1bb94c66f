# SPDX-License-Identifier: Apache-2.0
"""What jobs themselves say of their devices: a log that owes nothing to gpulock, and its judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path


@dataclass(frozen=True)
class Hold:
    """That a job had devices on a node from `start` to `end`; one that was killed has no end."""

    job: int
    node: str
    devices: tuple[str, ...]
    start: float
    end: float | None = None

    @property
    def last(self) -> float:
        """Return when it was last known to have them."""
        return self.start if self.end is None else self.end


@dataclass(frozen=True)
class Journal:
    """A file to which jobs append when they begin and when they end."""

    path: Path

    def clear(self) -> None:
        """Make the file, empty and writable for every job owner."""
        self.path.write_text("")
        self.path.chmod(0o666)

    def around(self, lines: str = "", who: str = "$SLURM_JOB_ID $SLURMD_NODENAME") -> str:
        """Return a bash script that runs `lines` between its two entries; `who`: job and node."""
        told = f"$EPOCHREALTIME {who} ${{CUDA_VISIBLE_DEVICES-every}}"
        entry = f'echo "%s {told}" >>{self.path}\n'
        return f"{entry % 'start'}{lines}\n{entry % 'end'}"

    def holds(self) -> list[Hold]:
        """Return every job's time with its devices, by its beginning."""
        return parse(self.path.read_text())


def parse(text: str) -> list[Hold]:
    """Return the holds of a journal."""
    found: list[Hold] = []
    for line in text.splitlines():
        word, time, job, node, *mask = line.split()
        if word == "start":
            devices = tuple(mask[0].split(",")) if mask else ()
            found.append(Hold(int(job), node, devices, float(time)))
        else:
            mine = [one for one in found if (one.job, one.node) == (int(job), node)]
            for one in mine[-1:]:
                found[found.index(one)] = replace(one, end=float(time))
    return sorted(found, key=lambda hold: hold.start)


def doubles(holds: Sequence[Hold]) -> list[str]:
    """Name every device that two jobs had at the same time."""
    return [
        f"{a.node} {','.join(sorted(shared))}: jobs {a.job} and {b.job}"
        for a, b in combinations(holds, 2)
        if a.node == b.node and a.start <= b.last and b.start <= a.last
        if (shared := {*a.devices} & {*b.devices})
    ]


def complaints(asked: Mapping[int, int], holds: Sequence[Hold]) -> list[str]:
    """Return what jobs may complain of; `asked` is how many GPUs each asked for."""
    ran = {hold.job for hold in holds}
    found = [f"job {job} never ran" for job in asked if job not in ran]
    for hold in holds:
        if hold.end is None:
            found.append(f"job {hold.job} was cut short")
        if not len(set(hold.devices)) == len(hold.devices) == asked[hold.job]:
            found.append(f"job {hold.job} asked for {asked[hold.job]} and saw {hold.devices}")
    return found + doubles(holds)
