# SPDX-License-Identifier: Apache-2.0
"""`srun -n1 true` on a real Slurm under gpulock's hooks and under /bin/true, and the Epilog's tail.

`make bench-slurm`, as root. Both in turn on an idle node of one lab; what the hooks take
themselves is measured in runs of their own, in which a small program stands before each.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.table import quantile
from tests.labs.slurm.config import Setup
from tests.labs.slurm.gpulock import Gpulock, installed
from tests.labs.slurm.lab import Slurm
from tests.labs.slurm.modes import by_slurm, wait_empty

ROUNDS = int(os.environ.get("GPULOCK_BENCH_ROUNDS", "30"))
JOBS = int(os.environ.get("GPULOCK_BENCH_JOBS", "200"))
LAB = "/tmp/gpulock-bench-slurm"  # a lab of its own: the tests' may be up
USER, GPU = "slalice", "--gres=gpu:1"
HOOKS = ("Prolog", "TaskProlog", "Epilog")
TIMER = Path(__file__).with_name("timer.c")
TRUE, OURS = "/bin/true", "gpulock"
CLOCK = """\
import os, sys, time
begun = time.perf_counter_ns()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
status = os.waitpid(pid, 0)[1]
print(time.perf_counter_ns() - begun)
sys.exit(os.waitstatus_to_exitcode(status))
"""


class Bench:
    """A node whose hooks are links that can be turned from one kind to another between jobs."""

    def __init__(self, gpus: Gpulock) -> None:
        self.gpus = gpus
        self._links = gpus.slurm.lab / "bench"
        self._links.mkdir()
        self._log = self._links / "log"
        self._log.touch()
        self._log.chmod(0o666)  # a TaskProlog is the user's
        self._programs = {(OURS, name): str(path) for name, path in gpus.setup.hooks.items()} | {
            (TRUE, name): TRUE for name in HOOKS
        }
        for (kind, name), real in list(self._programs.items()):
            timer = self._links / f"{Path(kind).name}.{name}"
            defines = {"REAL": real, "NAME": name, "LOG": str(self._log)}
            words = [f'-D{key}="{value}"' for key, value in defines.items()]
            subprocess.run(["gcc", "-O2", *words, "-o", timer, TIMER], check=True)
            self._programs[f"{kind}, timed", name] = str(timer)
        self.turn(TRUE)
        by_slurm(gpus, hooks={name: self._links / name for name in HOOKS})

    def turn(self, kind: str) -> None:
        """Let slurmd and slurmstepd run hooks of another kind from now on."""
        for name in HOOKS:
            beside = self._links / f".{name}"
            beside.symlink_to(self._programs[kind, name])
            beside.rename(self._links / name)

    def srun(self, kind: str) -> float:
        """Return the milliseconds of one srun on an idle node."""
        self.turn(kind)
        command = ["/usr/bin/python3", "-IS", "-c", CLOCK, "srun", "-n1", GPU, "true"]
        done = self.gpus.slurm.run_as(USER, command)
        if done.returncode != 0:
            raise RuntimeError(f"srun under {kind} exits {done.returncode}: {done.stderr}")
        wait_empty(self.gpus)
        return int(done.stdout) / 1e6

    def array(self) -> None:
        """Run many short jobs, as many at a time as there are GPUs."""
        self.turn(f"{OURS}, timed")
        self.gpus.slurm.submit(USER, GPU, f"--array=1-{JOBS}", "--output=/dev/null")
        wait_empty(self.gpus)

    def own_times(self) -> dict[str, list[float]]:
        """Return the milliseconds of every timed hook since the last time, by name."""
        lines = [line.split() for line in self._log.read_text().splitlines()]
        os.truncate(self._log, 0)
        return {name: [int(t) / 1e6 for n, t in lines if n == name] for name in HOOKS}


def alternate(bench: Bench) -> None:
    """Measure srun under each kind in turn, and print the excess beside the hooks' own times."""
    took: dict[str, list[float]] = {TRUE: [], OURS: []}
    own: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in HOOKS} for kind in took}
    bench.srun(OURS)
    for _ in range(ROUNDS):
        for kind, latencies in took.items():
            latencies.append(bench.srun(kind))
            bench.srun(f"{kind}, timed")
            for name, times in bench.own_times().items():
                own[kind][name] += times
    print(f"srun -n1 {GPU} true on an idle node, ms, {ROUNDS} each in turn")
    middles = {kind: statistics.median(latencies) for kind, latencies in took.items()}
    for kind, latencies in took.items():
        low, high = quantile(latencies, 0.25), quantile(latencies, 0.75)
        hooks = ", ".join(f"{n} {statistics.median(t):.2f}" for n, t in own[kind].items())
        print(f"  {kind:10} median {middles[kind]:7.2f} ({low:.2f} to {high:.2f}); hooks: {hooks}")
    before = {
        kind: sum(statistics.median(times[name]) for name in ("Prolog", "TaskProlog"))
        for kind, times in own.items()
    }
    print(
        f"  ratio {middles[OURS] / middles[TRUE]:.3f}, excess {middles[OURS] - middles[TRUE]:.2f}"
    )
    print(f"  Prolog and TaskProlog themselves take {before[OURS] - before[TRUE]:.2f} more")


def tail(bench: Bench) -> None:
    """Measure the hooks of many short jobs, and print how late the last of them are."""
    bench.array()
    print(f"\nthe hooks of {JOBS} jobs of 1 GPU, 8 at a time, ms")
    for name, times in bench.own_times().items():
        p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
        print(
            f"  {name:10} p50 {p50:7.2f}  p99 {p99:7.2f}  longest {max(times):7.2f} ({len(times)})"
        )


def main() -> int:
    """Bring up a lab, measure, take it down."""
    with Slurm(Setup(), names="gb", lab=LAB) as slurm:
        bench = Bench(installed(slurm))
        alternate(bench)
        tail(bench)
        (node,) = slurm.nodes
        print(f"  locks left: {len(bench.gpus.locks(node))}; node {slurm.node_state(node)[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
