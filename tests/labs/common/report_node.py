# SPDX-License-Identifier: Apache-2.0
"""A node of a lab whose GPUs do what a test says, seen by a real exporter on the NVML double."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from gpulock.node.sample import Sample
from tests.labs.common.exporter_node import exporter
from tests.labs.common.installed import Installed
from tests.nvml.double import Double
from tests.nvml.node import ENERGY

WATTS, GIB = 200, 1 << 30


@contextmanager
def observed(
    gpus: Installed,
    node: str,
    folder: Path,
    configure: Callable[..., None],
) -> Generator[Double]:
    """Let a node be observed.

    GPU 0 works for 75 % of the time and uses 3 GiB, GPU 1 does nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    configure()
    with exporter(gpus, node, folder, looks, at_work) as found:
        yield found.nvml


def at_work(nvml: Double) -> None:
    """Let GPU 0 work from now on."""
    energy = f"{ENERGY}+{WATTS * 1000}/s@{time.time_ns() // 1000}"
    nvml.update({"gpu0.memory.used": 3 * GIB, "gpu0.energy": energy})
    nvml.load(0, 75)


def looks(found: Sample) -> bool:
    """Return whether the exporter has seen GPU 0 at work."""
    return any((seen.busy or 0) > 0 for seen in found.devices.values())
