# SPDX-License-Identifier: Apache-2.0
"""GPUs of a real Slurm from job to job, their memory told by a real exporter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.labs.common.handover_node import (
    KEYS,
    LEFT,
    Gpus,
    Job,
    assert_freed,
    assert_put_away,
    observed,
    wait_out,
)
from tests.labs.common.processes import eldest
from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import gate_file, started, waiting_for
from tests.labs.slurm.modes import NODE, by_gpulock

pytestmark = pytest.mark.lab
GPUS = 4


@pytest.fixture
def node(slurm_gpus: Gpulock) -> Iterator[Gpus]:
    """Observe a node for a test."""
    place = slurm_gpus.slurm.lab / "handover"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    by_gpulock(slurm_gpus, {**KEYS, "EXPORTER_DIR": str(place / "exporter")})
    with observed(slurm_gpus, NODE, place) as found:
        yield found


def working(gpus: Gpulock, node: Gpus, name: str) -> Job:
    """Return a job of one GPU that uses memory."""
    go = gate_file(gpus, name)
    job = started(gpus, NODE, "--gres=gpu:1", script=waiting_for(go))
    (device,) = gpus.held_by(job)[NODE]
    shell = eldest(lambda: gpus.slurm.job_processes(job, NODE))
    return node.work(Job(job, device, shell, go, lambda: gpus.slurm.wait_done(job)))


def holding(gpus: Gpulock, count: int) -> list[str]:
    """Return the devices of a job that holds so many GPUs of the node."""
    return gpus.held_by(started(gpus, NODE, f"--gres=gpu:{count}"))[NODE]


def test_an_epilog_frees_a_device_whose_memory_stays_and_gpulockd_puts_it_out_until_it_is_clean(
    slurm_gpus: Gpulock, node: Gpus
) -> None:
    job = working(slurm_gpus, node, "go")
    assert_freed(node, job, LEFT)
    with daemon_on(slurm_gpus, NODE) as daemon:
        assert_put_away(node, job, daemon)
        assert job.device not in holding(slurm_gpus, GPUS - 1)
        node.rest(job.device, 0)
        wait_out(node, daemon, {})
        assert holding(slurm_gpus, 1) == [job.device]
