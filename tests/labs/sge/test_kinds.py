# SPDX-License-Identifier: Apache-2.0
"""Requests by kind under a real Grid Engine, on a node of two models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulock.simulate.presets import PRESETS
from tests.labs.common.installed import driver_settings
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import held, on
from tests.labs.sge.lab import JobId

pytestmark = pytest.mark.lab
NODE = NODES[0]
COMPLEXES = "gpu gpuj gpu_a100=model:a100* gpu_h200=model:h200"
CARDS = PRESETS["two-models"].gpus
H200 = {gpu.bus for gpu in CARDS if gpu.card}
A100 = {gpu.bus for gpu in CARDS} - H200
SLEEP = "exec sleep 600\n"


@pytest.fixture
def two_models(gpus: Gpulock) -> Iterator[Gpulock]:
    """Let NODE have four A100 and four H200, and Grid Engine count them by model as well."""
    tree = gpus.write_machine(NODE, "two-models").directory
    gpus.configure(NODE, **driver_settings(tree), SGE_COMPLEXES=COMPLEXES)
    for name in ("gpu_a100", "gpu_h200"):
        gpus.sge.set_complex(f"{name} {name} INT <= YES YES 0 0")
    counts = f"gpu={GPUS},gpuj={GPUS},slots=16,gpu_a100=4,gpu_h200=4"
    gpus.sge.set_exechost(NODE, counts)
    yield gpus
    gpus.sge.clear_jobs()
    gpus.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16")


def running(gpus: Gpulock, *words: str) -> JobId:
    """Start a job that sleeps; return its number."""
    job = gpus.sge.submit("glalice", *on(NODE, *words), stdin=SLEEP)
    gpus.sge.wait_running(job)
    return job


def test_a_job_gets_the_models_that_it_asks_for(two_models: Gpulock) -> None:
    h200 = running(two_models, "-l", "gpu_h200=1")
    both = running(two_models, "-l", "gpu_a100=1,gpu_h200=2")
    assert set(held(two_models, NODE, h200)) < H200
    mixed = set(held(two_models, NODE, both))
    assert (len(mixed & A100), len(mixed & H200)) == (1, 2)
    plain = set(held(two_models, NODE, running(two_models, "-l", "gpu=3")))
    assert len(plain) == 3
    assert plain < A100, "all of one model"
