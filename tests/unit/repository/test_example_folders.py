# SPDX-License-Identifier: Apache-2.0
"""The folders of docs/examples: what needs no scheduler and no Prometheus runs here."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.support.cli_site import Site
from tests.unit.repository.test_docs import ROOT

EXAMPLES = ROOT / "docs/examples"
GRAFANA = EXAMPLES / "prometheus/grafana"


def test_a_workstations_command_runs_with_the_gpu_that_it_says(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.set((EXAMPLES / "workstation/gpulock.conf").read_text())
    done = site.run("run", "-n", "1", "--wait", "--", str(EXAMPLES / "workstation/train.sh"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" has GPUs 0\n")
    assert site.call("status", "--json").exit_code == 0


def test_grafana_is_told_a_source_of_the_kind_that_the_dashboards_ask() -> None:
    sources = yaml.safe_load((GRAFANA / "datasources/gpulock.yml").read_text())["datasources"]
    (kind,) = {source["type"] for source in sources}
    boards = sorted((ROOT / "exporter/dashboards").glob("*.json"))
    assert len(boards) == 3
    for path in boards:
        board = json.loads(path.read_text())
        (chosen,) = [one for one in board["templating"]["list"] if one["type"] == "datasource"]
        assert chosen["query"] == kind
        used = {panel["datasource"]["uid"] for panel in board["panels"] if "datasource" in panel}
        assert used <= {f"${{{chosen['name']}}}"}
