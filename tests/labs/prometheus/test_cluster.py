# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster` through a real Prometheus that scrapes three simulated nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpulock.simulate.node import SimulatedNode, write_simulated_node
from tests.labs.prometheus.lab import (
    ENVIRONMENT,
    Program,
    Prometheus,
    exporter,
    free_address,
    gpulock,
)
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
IDLE_AFTER = 2  # seconds


@dataclass
class Scraped:
    """A simulated node with its exporter."""

    node: SimulatedNode
    address: str
    exporter: Program

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run gpulock on it."""
        return subprocess.run(
            gpulock(self.node.config, *words),
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def cluster(self) -> Any:
        """Return what `status --cluster --json` says on this node."""
        done = self.call("status", "--cluster", "--json")
        return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr}

    def totals(self) -> dict[str, int]:
        """Return how many of its devices are in each state, as it says itself."""
        found: dict[str, int] = json.loads(self.call("status", "--json").stdout)["totals"]
        del found["expected"]
        return found

    def run(self, devices: str) -> subprocess.Popen[bytes]:
        """Run a job that holds devices."""
        words = gpulock(self.node.config, "run", "--devices", devices, "--", "sleep", "600")
        return subprocess.Popen(words, env=ENVIRONMENT)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Scraped]]:
    """Give nodes that are scraped, each with the settings to ask for all of them."""
    made: list[Scraped] = []
    try:
        for preset in ("dgx1", "a100-mig", "dgx-h200"):
            node = write_simulated_node(tmp_path / preset, preset)
            with node.config.open("a") as file:
                file.write(f"IDLE_AFTER={IDLE_AFTER}\n")
            address = free_address()
            running = exporter(node.config, node.exporter_dir, address)
            made.append(Scraped(node, address, running))
        with Prometheus(tmp_path, {"gpulock": [one.address for one in made]}, {}) as server:
            for one in made:
                with one.node.config.open("a") as file:
                    file.write(f"PROMETHEUS_URL=http://{server.address}\n")
            yield made
    finally:
        for one in made:
            one.exporter.end()


def test_all_nodes_are_told_as_each_tells_itself_and_one_that_is_down_is_named(
    nodes: list[Scraped],
) -> None:
    first, second, third = nodes
    idle = first.node.machine.gpus[1].bus
    (first.node.directory / "telemetry").write_text(f"idle={idle}\n")
    first.call("quarantine", "7", "--reason", "Xid 79")
    jobs = [first.run("0,1"), second.run("1:gi1.ci0")]
    try:

        def agreed() -> Any:
            told = first.cluster()
            states = [node["states"] for node in told.get("nodes", [])]
            same = sorted(map(str, states)) == sorted(str(one.totals()) for one in nodes)
            return told if same and any(one and one["held_idle"] for one in states) else None

        def settled() -> Any:
            """Return what is told once it agrees: the queries of one answer are not of one time."""
            return agreed() and agreed()

        found = wait_until(
            settled, why=lambda: f"the cluster to agree with its nodes\n{first.cluster()!s}"
        )
        assert found["totals"]["held_idle"] == 1
        assert found["totals"]["quarantined"] == 1
        assert found["totals"]["nodes_down"] == 0
        models = {one["model"]: one["devices"] for one in found["models"]}
        assert models["V100-SXM2-32GB"] == models["H200"] == 8
        assert models["A100-SXM4-80GB 3g.40gb"] > 0
        (user,) = found["users"]
        assert (user["devices"], user["jobs"], user["nodes"]) == (3, 2, 2)
        assert user["states"]["held_idle"] == 1

        third.exporter.end(kill=True)
        down = wait_until(
            lambda: (
                found
                if (found := first.cluster()).get("totals", {}).get("nodes_down") == 1
                else None
            ),
            why=lambda: f"the node to be down\n{first.cluster()!s}",
        )
        told = {node["instance"]: node for node in down["nodes"]}
        assert told[third.address]["states"] is None
        assert len(told) == 3
        text = first.call("status", "--cluster").stdout
        assert f"down  {third.address}: Prometheus does not reach the exporter" in text
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def test_a_prometheus_that_knows_no_gpulock_is_said(tmp_path: Path) -> None:
    node = write_simulated_node(tmp_path / "node", "workstation")
    with Prometheus(tmp_path, {"other": [free_address()]}, {}) as server:
        with node.config.open("a") as file:
            file.write(f"PROMETHEUS_URL=http://{server.address}\n")
        done = Scraped(node, "", None).call("status", "--cluster")  # type: ignore[arg-type]
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no series of gpulock" in done.stderr
