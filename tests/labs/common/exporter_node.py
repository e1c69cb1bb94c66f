# SPDX-License-Identifier: Apache-2.0
"""A real exporter on a node of a lab, on the NVML double: its GPUs are what a test says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from gpulock.node.sample import SAMPLE, SAMPLE_LINE, Sample, load_sample_file
from tests.labs.common.installed import CONFIG, Installed
from tests.nvml.double import Double
from tests.support.wait import wait_exit, wait_until

PLACE = "/run/gpulock-exporter"
PROGRAM = [
    sys.executable,
    "-c",
    "from gpulock_exporter.app.program import main; raise SystemExit(main())",
]
ADDRESS = "127.0.0.1:9465"


class Observer:
    """The exporter of one node; `nvml` is what it hears, `folder` is what it writes."""

    def __init__(self, nvml: Double, folder: Path) -> None:
        self.nvml = nvml
        self.folder = folder

    def sample(self) -> Sample | None:
        """Return what it told last, however long ago."""
        return load_sample_file(f"{self.folder}/{SAMPLE}", SAMPLE_LINE)


@contextmanager
def exporter(
    gpus: Installed,
    node: str,
    place: Path,
    until_then: Callable[[Sample], bool],
    prepare: Callable[[Double], None] = lambda _: None,
) -> Generator[Observer]:
    """Run an exporter on a node; `place` is for what it hears and says.

    `prepare` sets the double before the exporter's
    first look, `until_then` says what it must have told before we go on.
    """
    folder, stderr = gpus.cluster.path_in(node, PLACE), place / "stderr"
    shutil.rmtree(folder, ignore_errors=True)
    with Double(place / "nvml", node=gpus.drivers / node) as nvml:
        prepare(nvml)
        words = ["--config", CONFIG, "--listen", ADDRESS]
        env = [f"{key}={value}" for key, value in nvml.env.items()]
        with stderr.open("wb") as errors:
            process = subprocess.Popen(
                [*gpus.cluster.machines[node].enter(), "env", *env, *PROGRAM, *words],
                stderr=errors,
                stdin=subprocess.DEVNULL,
            )
        made = Observer(nvml, folder)

        def told() -> bool:
            found = made.sample()
            return found is not None and until_then(found)

        try:
            wait_until(told, why=lambda: f"the exporter to tell\n{stderr.read_text()}")
            yield made
        finally:
            process.terminate()
            wait_exit(process, why="the exporter to stop")
            shutil.rmtree(folder, ignore_errors=True)
