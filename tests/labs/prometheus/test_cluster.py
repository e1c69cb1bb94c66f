# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster` through a real Prometheus that scrapes three simulated nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpulock.alloc import states
from gpulock.simulate.node import SimulatedNode, write_simulated_node
from tests.labs.prometheus.lab import (
    ENVIRONMENT,
    Program,
    Prometheus,
    exporter,
    free_address,
    gpulock,
)
from tests.support.runner import read_table
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
IDLE_AFTER = 2  # seconds
COUNTED = (("FREE", states.FREE), ("HELD", states.HELD), ("IDLE", states.HELD_IDLE))
OTHERS = [name for name in states.STATES if name not in dict(COUNTED).values()]


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

    def cluster(self) -> str:
        """Return what `status --cluster` says on this node."""
        done = self.call("status", "--cluster")
        return done.stdout or done.stderr

    def counts(self) -> dict[str, str]:
        """Return how many of its devices are in each state, as it says itself."""
        found = json.loads(self.call("status", "--json").stdout)["totals"]
        others = [f"{found[name]} {name}" for name in OTHERS if found[name]]
        own = {title: str(found[name]) for title, name in COUNTED}
        return own | ({"OTHER": ", ".join(others)} if others else {})

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

        def agreed() -> str | None:
            text = first.cluster()
            shown = read_table(text, "NODE") if "NODE" in text else {}
            same = all(shown.get(one.address, {}).items() >= one.counts().items() for one in nodes)
            return text if same and shown[first.address]["IDLE"] == "1" else None

        def settled() -> str | None:
            """Return what is told once it agrees: the queries of one answer are not of one time."""
            return agreed() and agreed()

        text = wait_until(settled, why=lambda: f"the cluster to agree\n{first.cluster()}")
        assert read_table(text, "NODE")[first.address]["OTHER"] == "1 quarantined"
        assert "  down  " not in text
        models = read_table(text, "MODEL")
        assert models["V100-SXM2-32GB"]["GPUS"] == models["H200"]["GPUS"] == "8"
        assert int(models["A100-SXM4-80GB 3g.40gb"]["GPUS"]) > 0
        (user,) = read_table(text, "USER").values()
        assert (user["GPUS"], user["JOBS"], user["NODES"], user["IDLE"]) == ("3", "2", "2", "1")

        third.exporter.end(kill=True)
        told = f"down  {third.address}: Prometheus does not reach the exporter"
        wait_until(lambda: told in first.cluster(), why=first.cluster)
        assert len(read_table(first.cluster(), "NODE")) == 3
    finally:
        for job in jobs:
            job.kill()
            job.wait()
