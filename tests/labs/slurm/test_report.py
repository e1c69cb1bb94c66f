# SPDX-License-Identifier: Apache-2.0
"""The report of a job of a real Slurm, against what its GPUs were made to do."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest

from tests.labs.common.report_node import GIB, observed
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import by_slurm, settings

pytestmark = pytest.mark.lab
SECONDS = 10


def watched(gpus: Gpulock, stack: ExitStack, nodes: list[str]) -> None:
    """Let nodes be observed."""
    by_slurm(gpus)
    for node in nodes:

        def configure(node: str = node, **keys: str) -> None:
            gpus.configure(node, **settings(gpus, SLURM_DEVICE_SELECTION="slurm", **keys))

        folder = gpus.slurm.lab / "report" / node
        stack.enter_context(observed(gpus, node, folder, configure))


def claims(gpus: Gpulock, node: str, job: JobId) -> list[dict[str, Any]]:
    """Return the claims that a report tells of."""
    done = gpus.command(node, "report", str(job), "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["claims"]
    return found


@pytest.mark.short
def test_of_a_job_on_two_nodes_each_tells_its_own_part(slurm_gpus: Gpulock) -> None:
    slurm, nodes = slurm_gpus.slurm, list(slurm_gpus.slurm.nodes[:2])
    with ExitStack() as stack:
        watched(slurm_gpus, stack, nodes)
        job = slurm.submit(
            "slalice", "-N2", "--gres=gpu:1", "-w", ",".join(nodes), script=f"sleep {SECONDS}\n"
        )
        slurm.wait_done(job)
        for node in nodes:
            (found,) = claims(slurm_gpus, node, job)
            (used,) = found["devices"]
            assert found["node"] == node
            assert used["utilization"] == pytest.approx(0.75, abs=0.06)
            assert used["memory_peak_bytes"] == pytest.approx(3 * GIB, rel=0.01)
