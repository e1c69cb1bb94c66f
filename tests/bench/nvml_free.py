# SPDX-License-Identifier: Apache-2.0
"""What the NVML double itself costs the exporter: a process in C makes the same calls beside it.

The double is a library of tests: it looks at its control file at each call and works its answers
out of text. What it costs is no part of what the exporter would on an NVML that costs nothing.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpulock_exporter.nvml.field_values import ENERGY, POWER, slow_fields
from gpulock_exporter.nvml.gpm import METRICS

from tests.nvml.build import FLAGS, SOURCES, run_compiler
from tests.nvml.double import Double

SOURCE = Path(__file__).with_name("nvml_look.c")
ALIKE = 0.05  # of the calls: looks are not counted to the call
SCHED_CLOCK = 2  # CPUCLOCK_SCHED of the kernel's posix-timers.h, in nanoseconds


def processor(pids: Iterable[int]) -> float:
    """Return the seconds of processor time that processes took so far.

    By their clocks, clock_getcpuclockid(3): /proc counts in hundredths of a second.
    """
    return sum(time.clock_gettime((~pid << 3) | SCHED_CLOCK) for pid in pids)


def shares(groups: Mapping[str, list[int]], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return the shares of a core that groups of processes take at the same time, in percent."""
    found: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(rounds):
        before = {name: processor(pids) for name, pids in groups.items()}
        began = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        for name, pids in groups.items():
            found[name].append(100 * (processor(pids) - before[name]) / passed)
    return found


def bare_look(root: Path, nvml: Double) -> list[str]:
    """Compile the process of bare calls; return its command line for the calls of a look."""
    program = root / "nvml_look"
    own = ("-I", SOURCES, SOURCE, "-o", program)
    run_compiler(*FLAGS, *own, f"-L{nvml.library.parent}", f"-l:{nvml.library.name}")
    asked = (POWER, ENERGY), slow_fields(nvlink=True, pcie=False)
    fields = [",".join(f"{field.id}:{field.scope}" for field in some) for some in asked]
    return [str(program), ",".join(map(str, METRICS)), *fields]


@contextmanager
def bare(root: Path, nvml: Double) -> Generator[tuple[int, int]]:
    """Run the calls of a look once a second; give its pid, and that of one that only wakes up."""
    words = bare_look(root, nvml)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in (words, words[:1]):
            process = subprocess.Popen(
                command, env={**os.environ, **nvml.env}, stdout=subprocess.PIPE
            )
            started.append(process)
            if process.stdout is None or process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{SOURCE.name} cannot open the double")
        yield started[0].pid, started[1].pid
    finally:
        for process in started:
            process.kill()
            process.communicate()


def calls_a_second(nvml: Double, during: Callable[[], None]) -> dict[str, float]:
    """Return how often each function of a double is called a second meanwhile."""
    before, began = nvml.calls(), time.monotonic()
    during()
    made, passed = nvml.calls() - before, time.monotonic() - began
    return {name: count / passed for name, count in made.items()}


def check_alike(ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    """Raise RuntimeError where the bare process does not make the calls that the exporter makes."""
    different = {name for name in {*ours, *theirs} if not (ours.get(name) and theirs.get(name))}
    apart = abs(sum(ours.values()) / sum(theirs.values()) - 1)
    if different or apart > ALIKE:
        raise RuntimeError(
            f"{SOURCE.name} makes other calls than the exporter ({sum(theirs.values()):.0f} and "
            f"{sum(ours.values()):.0f} a second; {sorted(different)}): bring it up to date"
        )
