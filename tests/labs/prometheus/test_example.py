# SPDX-License-Identifier: Apache-2.0
"""docs/examples/prometheus: a real Prometheus takes it, and has the series of the rules."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.labs.prometheus.lab import RULES, Prometheus, program
from tests.labs.prometheus.scene import scene

pytestmark = pytest.mark.lab
EXAMPLE = Path(__file__).parents[3] / "docs/examples/prometheus/prometheus.yml"


def test_promtool_accepts_the_configuration_beside_the_shipped_rules(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    shutil.copytree(RULES, tmp_path / "rules")
    command = [program("promtool"), "check", "config", str(tmp_path / EXAMPLE.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rule files found" in done.stdout


class Example(Prometheus):
    """A Prometheus of the example's configuration, which scrapes another address every second."""

    def configuration(self) -> str:
        """Return the example, with its node's address and its interval as this lab has them."""
        shutil.copytree(RULES, self.folder / "rules")
        (address,) = self.targets["gpulock"]
        text = EXAMPLE.read_text().replace("localhost:9465", address).replace("15s", "1s")
        return "global: {evaluation_interval: 1s}\n" + text


def test_its_rules_have_the_job_of_each_gpu(tmp_path: Path) -> None:
    with (
        scene("dgx1") as node,
        Example(tmp_path, {"gpulock": [node.address]}, {}) as server,
    ):
        job = node.run(2)
        server.wait("gpulock:job:gpus:count == 2", series=1)
        node.end(job)
        node.clear()
