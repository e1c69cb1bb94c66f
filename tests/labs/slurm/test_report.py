# SPDX-License-Identifier: Apache-2.0
"""What a job of a real Slurm is told at its end, against what its GPUs were made to do."""

from __future__ import annotations

import base64
import gzip
import json
import runpy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.labs.common.report_node import GIB, observed
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import by_slurm, settings
from tests.support.cli_site import ROOT
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
SECONDS = 10


def watched(gpus: Gpulock, stack: ExitStack, nodes: list[str]) -> Path:
    """Let nodes be observed; return the folder that collects their reports."""
    by_slurm(gpus)
    for node in nodes:

        def configure(node: str = node, **keys: str) -> None:
            gpus.configure(node, **settings(gpus, SLURM_DEVICE_SELECTION="slurm", **keys))

        folder = gpus.slurm.lab / "report" / node
        stack.enter_context(observed(gpus, node, folder, configure))
    return gpus.slurm.lab / "report" / "shared"


def claims(gpus: Gpulock, node: str, job: JobId) -> list[dict[str, Any]]:
    """Return the claims that a report tells of."""
    done = gpus.command(node, "report", str(job), "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["claims"]
    return found


def jobstats(gpus: Gpulock, node: str, job: JobId) -> dict[str, Any]:
    """Return what a job's comment tells jobstats."""
    told = json.loads(gpus.command(node, "report", str(job), "--json", "--last").stdout)
    make = runpy.run_path(str(ROOT / "docs/examples/jobstats-comment"))["make_comment"]
    comment = make(told["claims"]).removeprefix("JS1:")
    known: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(comment)))
    return known


@pytest.mark.short
def test_a_job_on_two_nodes_is_told_as_one_also_to_jobstats(slurm_gpus: Gpulock) -> None:
    slurm, nodes = slurm_gpus.slurm, list(slurm_gpus.slurm.nodes[:2])
    with ExitStack() as stack:
        shared = watched(slurm_gpus, stack, nodes)
        job = slurm.submit(
            "slalice", "-N2", "--gres=gpu:1", "-w", ",".join(nodes), script=f"sleep {SECONDS}\n"
        )
        slurm.wait_done(job)

        def both() -> bool:
            return len(list(shared.glob(f"{job}.*.json"))) == 2

        wait_until(both, why="both nodes' reports")
        for node in nodes:
            assert sorted(one["node"] for one in claims(slurm_gpus, node, job)) == nodes
        known = jobstats(slurm_gpus, nodes[0], job)
        assert sorted(known["nodes"]) == nodes and known["gpus"] == 2
        for node in nodes:
            assert known["nodes"][node]["gpu_utilization"]["0"] == pytest.approx(75, abs=6)
            assert known["nodes"][node]["gpu_used_memory"]["0"] == pytest.approx(3 * GIB, rel=0.01)
        assert "gpulock report" not in slurm.said(job), "two nodes would write one file at once"
