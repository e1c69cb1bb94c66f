# SPDX-License-Identifier: Apache-2.0
"""200 short jobs on a node of a real scheduler, under gpulock's hooks and under /bin/true.

`make bench-sge` and `make bench-slurm`, as root: rounds of both in turn on one lab, from the
submission of an array to the end of its last job; the median of each, and the ratio.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tests.bench.harness import Samples, Target, median, print_rows, run_bench, timed
from tests.labs.sge import cluster
from tests.labs.sge import gpulock as on_sge
from tests.labs.sge.lab import GridEngine
from tests.labs.slurm import gpulock as on_slurm
from tests.labs.slurm.config import Setup
from tests.labs.slurm.lab import Slurm
from tests.labs.slurm.modes import by_slurm, wait_empty

JOBS, ROUNDS = 200, 3
TRUE, OURS = "/bin/true", "gpulock"
LIMITS = {"sge": 1.03}  # gpulock / true: of Slurm the ratio is printed alone
LAB = "/tmp/gpulock-bench-slurm"  # a lab of its own: the tests' may be up
Turn = Callable[[str], None]  # lets the nodes run hooks of a kind


@contextmanager
def grid_engine() -> Generator[tuple[Turn, Callable[[], None]]]:
    """Give what turns the hooks of a real Grid Engine, and what runs the jobs."""
    sge = GridEngine()
    sge.up()
    try:
        gpus = on_sge.installed(sge)
        gpus.prepare()

        def turn(kind: str) -> None:
            ours = kind == OURS
            sge.set_hooks(*(gpus.line(n) if ours else f"root@{TRUE}" for n in ("prolog", "epilog")))

        def run_jobs() -> None:
            one_node = ("-q", "gpu.q", "-l", f"h={cluster.NODES[0]},gpu=1")
            job = sge.submit("glalice", "-j", "y", "-t", f"1-{JOBS}", *one_node, stdin="true\n")
            sge.wait_done(job)

        yield turn, run_jobs
    finally:
        sge.down()


@contextmanager
def slurm() -> Generator[tuple[Turn, Callable[[], None]]]:
    """Give what turns the hooks of a real Slurm, and what runs the jobs."""
    with Slurm(Setup(), names="gb", lab=LAB) as lab:
        gpus = on_slurm.installed(lab)
        ours = gpus.setup.hooks

        def turn(kind: str) -> None:
            by_slurm(gpus, hooks=ours if kind == OURS else dict.fromkeys(ours, TRUE))

        def run_jobs() -> None:
            lab.submit("slalice", "--gres=gpu:1", f"--array=1-{JOBS}", "--output=/dev/null")
            wait_empty(gpus)

        yield turn, run_jobs


def measure(scheduler: str) -> list[Target]:
    """Bring up a lab, measure, take it down."""
    took: Samples = {TRUE: [], OURS: []}
    with (grid_engine if scheduler == "sge" else slurm)() as (turn, run_jobs):
        for number in range(1 + ROUNDS):
            for kind, values in took.items():
                turn(kind)
                spent = timed(run_jobs)
                if number:  # the first claims of a node do more
                    values.append(spent)
    print_rows(f"{JOBS} short jobs on a real scheduler ({scheduler})", took)
    what, ratio = f"{OURS} / {TRUE}", median(took[OURS]) / median(took[TRUE])
    print(f"  {what}: {ratio:.3f}")
    return [Target(what, ratio, LIMITS[scheduler])] if scheduler in LIMITS else []


if __name__ == "__main__":
    sys.exit(run_bench("short-jobs", lambda _: measure(sys.argv[1])))
