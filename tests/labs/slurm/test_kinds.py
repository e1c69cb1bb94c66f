# SPDX-License-Identifier: Apache-2.0
"""Typed GRES under a real Slurm where gpulock selects, on a node of two models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from gpulock.simulate.node import write_simulated_node
from gpulock.simulate.presets import PRESETS
from tests.labs.common.installed import driver_settings
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import started
from tests.labs.slurm.modes import NODE, by_gpulock, settings, write_map

pytestmark = pytest.mark.lab
CARDS = 4  # two A100, two H200
GPUS = PRESETS["two-models"].take(CARDS).gpus
H200 = {gpu.bus for gpu in GPUS if gpu.card}
A100 = {gpu.bus for gpu in GPUS} - H200
TYPES = {gpu.minor: "h200" if gpu.bus in H200 else "a100" for gpu in GPUS}


@pytest.fixture(params=["gpu gpux", "gpu"], ids=["slurmctld", "positions"])
def two_models(slurm_gpus: Gpulock, request: pytest.FixtureRequest) -> Iterator[Gpulock]:
    """Let NODE have two A100 and two H200, and Slurm count them by type."""
    keys = {"SLURM_GRES": str(request.param)}
    by_gpulock(slurm_gpus, keys, types=TYPES)
    tree = slurm_gpus.slurm.lab / "machine.models"
    shutil.rmtree(tree, ignore_errors=True)
    found = write_simulated_node(tree, "two-models", CARDS)
    changes = {"SLURM_DEVICE_SELECTION": "gpulock", **keys, **driver_settings(found.directory)}
    slurm_gpus.configure(NODE, **settings(slurm_gpus, **changes))
    write_map(slurm_gpus, NODE, sorted(TYPES))  # slurmd's order: by type as in slurm.conf
    yield slurm_gpus
    slurm_gpus.slurm.clear_jobs()
    (slurm_gpus.slurm.path_in(NODE, "/var/lib/gpulock") / "slurm-map").unlink(missing_ok=True)


def test_a_job_gets_the_model_of_its_type(two_models: Gpulock) -> None:
    first = started(two_models, NODE, "--gres=gpu:h200:1")
    second = started(two_models, NODE, "--gres=gpu:h200:1")
    other = started(two_models, NODE, "--gres=gpu:a100:2")
    found = [set(two_models.held_by(job)[NODE]) for job in (first, second, other)]
    assert [len(devices) for devices in found] == [1, 1, 2]
    assert found[0] | found[1] == H200
    assert found[2] == A100
