# SPDX-License-Identifier: Apache-2.0
"""How much longer `gpulock status` takes than the interpreter that runs it."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from tests.support.scene import Scene

CLI = "import sys; from gpulock.cli import main; sys.exit(main())"


def over_interpreter(scene: Scene, rounds: int) -> float:
    """Return the difference of the medians in milliseconds; raise RuntimeError."""
    command = [sys.executable, "-c", CLI, "--config", str(scene.config), "status"]
    floor = [sys.executable, "-c", "pass"]
    samples: dict[str, list[float]] = {"status": [], "floor": []}
    for number in range(rounds + 1):
        for name, argv in (("status", command), ("floor", floor)):
            begun = time.perf_counter_ns()
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"gpulock status exits {done.returncode}: {done.stderr}")
            if number:
                samples[name].append((time.perf_counter_ns() - begun) / 1e6)
    return statistics.median(samples["status"]) - statistics.median(samples["floor"])
