# SPDX-License-Identifier: Apache-2.0
"""A node of a lab whose GPUs do what a test says, seen by a real exporter on the NVML double."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpulock.sample import SAMPLE, SAMPLE_LINE, load
from tests.labs.sge_wait import until
from tests.nvml.double import Double

CONFIG = "/etc/gpulock/gpulock.conf"
EXPORTER = [sys.executable, "-c", "from gpulock_exporter.app import main; raise SystemExit(main())"]
GPULOCK = "from gpulock.cli import main; main()"
WATTS, GIB = 200, 1 << 30


@contextmanager
def observed(
    folder: Path,
    driver: Path,
    enter: Sequence[str],
    configure: Callable[..., None],
) -> Generator[Double]:
    """Let a node be observed; `enter` begins a command line that runs there.

    GPU 0 works for 75 % of the time and uses 3 GiB, GPU 1 does nothing; reports are made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    exporter, shared = folder / "exporter", folder.parent / "shared"
    shared.mkdir(exist_ok=True)
    shared.chmod(0o1777)
    program = folder / "gpulock"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{GPULOCK}' \"$@\"\n")
    program.chmod(0o755)
    configure(
        EXPORTER_DIR=str(exporter),
        REPORT_AT_END="yes",
        REPORT_DIR=str(shared),
        REPORT_COMMAND=str(program),
    )
    with Double(folder / "nvml", node=driver) as nvml:
        energy = f"7000000000+{WATTS * 1000}/s@{time.time_ns() // 1000}"  # millijoules
        nvml.update({"gpu0.memory.used": 3 * GIB, "gpu0.energy": energy})
        nvml.load(0, 75)
        words = ["--config", CONFIG, "--folder", str(exporter), "--listen", "127.0.0.1:9465"]
        env = [f"{key}={value}" for key, value in nvml.env.items()]
        with (folder / "stderr").open("wb") as errors:
            process = subprocess.Popen(
                [*enter, "env", *env, *EXPORTER, *words], stderr=errors, stdin=subprocess.DEVNULL
            )
        try:
            until(
                lambda: looks(exporter),
                what="the exporter to look",
                why=(folder / "stderr").read_text,
            )
            yield nvml
        finally:
            process.terminate()
            process.wait(20)


def looks(exporter: Path) -> bool:
    """Return whether the exporter has seen GPU 0 at work."""
    found = load(f"{exporter}/{SAMPLE}", SAMPLE_LINE)
    return found is not None and any((seen.busy or 0) > 0 for seen in found.devices.values())
