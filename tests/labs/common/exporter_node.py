# SPDX-License-Identifier: Apache-2.0
"""A real exporter on a node of a lab, on the NVML double: its GPUs are what a test says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from gpulock.daemon.core.sample import SAMPLE, SAMPLE_LINE, load_sample_file
from tests.labs.common.installed import CONFIG, Installed
from tests.nvml.double import Double
from tests.support.wait import wait_exit, wait_until

PLACE = "/run/gpulock-exporter"
PROGRAM = "from gpulock_exporter.app.program import main; raise SystemExit(main())"


@contextmanager
def exporter(
    gpus: Installed, node: str, place: Path, at_work: Iterable[int], percent: int
) -> Generator[Double]:
    """Run an exporter on a node whose GPUs of these indexes are at work; yield what it hears.

    `place` is for that, and for what it says.
    """
    folder, stderr = gpus.cluster.path_in(node, PLACE), place / "stderr"
    shutil.rmtree(folder, ignore_errors=True)
    with Double(place / "nvml", node=gpus.drivers / node) as nvml:
        for index in at_work:
            nvml.load(index, percent)
        env = ["env", *(f"{key}={value}" for key, value in nvml.env.items())]
        words = [sys.executable, "-c", PROGRAM, "--config", CONFIG, "--listen", "127.0.0.1:9465"]
        with stderr.open("wb") as errors:
            process = subprocess.Popen(
                [*gpus.cluster.machines[node].enter(), *env, *words],
                stderr=errors,
                stdin=subprocess.DEVNULL,
            )

        def has_told() -> bool:
            found = load_sample_file(f"{folder}/{SAMPLE}", SAMPLE_LINE)
            return found is not None and bool(found.devices)

        try:
            wait_until(has_told, why=lambda: f"the exporter to tell\n{stderr.read_text()}")
            yield nvml
        finally:
            process.terminate()
            wait_exit(process, why="the exporter to stop")
            shutil.rmtree(folder, ignore_errors=True)
