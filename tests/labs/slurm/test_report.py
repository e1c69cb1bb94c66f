# SPDX-License-Identifier: Apache-2.0
"""What a job of a real Slurm is told at its end, against what its GPUs were made to do."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import runpy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.labs.common.installed import script
from tests.labs.common.report_node import GIB, observed
from tests.labs.slurm.config import UNIFIED
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import SLURM_CONF, by_slurm, settings
from tests.support.cli_site import ROOT
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
SECONDS = 10
MIB = 1 << 20
CPU_SECONDS, TOUCHED = 3, 200 * MIB
HOST = ("cpu_seconds", "host_memory_peak_bytes", "cpus")
CONTROLLERS = Path("/sys/fs/cgroup/cgroup.controllers")
# Of version 2 a kernel may have no memory controller left: then slurmd does not account by cgroup.
COUNTED = not UNIFIED or "memory" in CONTROLLERS.read_text().split()
ACCOUNTED = {"JobAcctGatherType": "jobacct_gather/cgroup"} if COUNTED else {}
BURN = f"""
import time
held = b"x" * {TOUCHED}
while time.process_time() < {CPU_SECONDS}:
    pass
"""


def watched(
    gpus: Gpulock, stack: ExitStack, nodes: list[str], sys_root: str = "", **setup: Any
) -> Path:
    """Let nodes be observed; return the folder that collects their reports."""
    by_slurm(gpus, **setup)
    more = {"SYS_ROOT": sys_root} if sys_root else {}
    for node in nodes:

        def configure(node: str = node, **keys: str) -> None:
            gpus.configure(node, **settings(gpus, SLURM_DEVICE_SELECTION="slurm", **more, **keys))

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
def test_a_jobs_report_has_what_the_job_used_of_its_host(slurm_gpus: Gpulock) -> None:
    slurm, node = slurm_gpus.slurm, slurm_gpus.slurm.nodes[0]
    with ExitStack() as stack:
        setup = {"proctrack": "cgroup", "extra": {**SLURM_CONF, **ACCOUNTED}}
        watched(slurm_gpus, stack, [node], "/sys", **setup)
        burn = script(slurm_gpus, "burn.py", BURN)
        text = f"/usr/bin/python3 -IS {burn}\nsleep 3\n"
        job = slurm.submit("slalice", "--gres=gpu:1", "-w", node, script=text)
        slurm.wait_done(job)
        wait_until(lambda: "gpulock report" in slurm.said(job), why="the report")
        done = slurm_gpus.command(node, "reap")
        assert done.returncode == 0, done.stderr
        (found,) = claims(slurm_gpus, node, job)
        spent, peak, cpus = [found[name] for name in HOST]
        assert CPU_SECONDS <= spent <= CPU_SECONDS + 2
        assert (peak is not None) == COUNTED, "what no cgroup tells is not known"
        assert peak is None or TOUCHED <= peak <= TOUCHED + 100 * MIB
        assert "of processor time" in slurm.said(job)
        assert ("memory peak" in slurm.said(job)) == COUNTED
        listed = slurm_gpus.command(node, "history", "--job", str(job), "--csv").stdout
        (row,) = csv.DictReader(io.StringIO(listed))
        assert [row[name] for name in HOST] == [
            "" if x is None else str(x) for x in (spent, peak, cpus)
        ]
        told = jobstats(slurm_gpus, node, job)["nodes"][node]
        assert ("total_time" in told) == (cpus is not None)
        assert told.get("total_time", spent) == pytest.approx(spent, abs=0.1)


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
