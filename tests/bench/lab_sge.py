# SPDX-License-Identifier: Apache-2.0
"""200 short jobs on a node of a real Grid Engine, under gpulock's hooks and under /bin/true.

`make bench-sge`, as root. Rounds of both in turn on one lab; the median of each, and the ratio.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock, installed
from tests.labs.sge.lab import GridEngine

JOBS = int(os.environ.get("GPULOCK_BENCH_JOBS", "200"))
ROUNDS = int(os.environ.get("GPULOCK_BENCH_ROUNDS", "3"))
LIMIT = 1.03


def one_round(gpus: Gpulock, prolog: str, epilog: str) -> float:
    """Return the seconds from the submission of an array of short jobs to the end of the last."""
    gpus.sge.set_hooks(prolog, epilog)
    begun = time.monotonic()
    job = gpus.sge.submit(
        "glalice",
        "-j",
        "y",
        "-t",
        f"1-{JOBS}",
        "-q",
        "gpu.q",
        "-l",
        f"h={NODES[0]},gpu=1",
        stdin="true\n",
    )
    gpus.sge.wait_done(job)
    return time.monotonic() - begun


def main() -> int:
    """Bring up a lab, measure, take it down."""
    sge = GridEngine()
    sge.up()
    try:
        gpus = installed(sge)
        gpus.prepare()
        kinds = {
            "/bin/true": ("root@/bin/true", "root@/bin/true"),
            "gpulock": (gpus.line("prolog"), gpus.line("epilog")),
        }
        one_round(gpus, *kinds["gpulock"])
        took: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, hooks in kinds.items():
                took[name].append(one_round(gpus, *hooks))
        left = {node: gpus.locks(node) for node in sge.machines if node.startswith("glnode")}
    finally:
        sge.down()
    for name, seconds in took.items():
        shown = " ".join(f"{s:.2f}" for s in seconds)
        print(f"  {name:10} median {statistics.median(seconds):6.2f} s of {JOBS} jobs ({shown})")
    ratio = statistics.median(took["gpulock"]) / statistics.median(took["/bin/true"])
    print(f"  {'MET' if ratio <= LIMIT else 'MISSED'}: {ratio:.3f} x, limit {LIMIT}")
    print(f"  locks left: {sum(len(locks) for locks in left.values())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
