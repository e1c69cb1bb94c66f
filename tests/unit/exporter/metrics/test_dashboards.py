# SPDX-License-Identifier: Apache-2.0
"""The dashboards that are shipped speak of what there is, and lie in Grafana's grid."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.dashboards import board_queries, shipped_boards
from tests.unit.exporter.metrics.test_rules import asked, families, named

SERIES = re.compile(r"\b(?:gpulock[_:][\w:]+|ALERTS)\b")
# panels of the node, and which of their queries promtool's tests ask as well
TESTED = {"XID": (0,), "Shared GPUs": (1, 2, 3), "Holders": (0, 1)}


@pytest.fixture(scope="module", params=sorted(shipped_boards()))
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Give each dashboard."""
    return shipped_boards()[request.param]


def test_a_dashboard_speaks_of_series_that_there_are(board: dict[str, Any]) -> None:
    spoken = {name for text in board_queries(board) for name in SERIES.findall(text)}
    assert spoken - families() - set(named("record")) - {"ALERTS"} == set()


def test_panels_have_names_of_their_own_and_ask_the_source_that_is_chosen(
    board: dict[str, Any],
) -> None:
    panels, source = board["panels"], {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        targets = panel.get("targets", ())
        assert len({target["refId"] for target in targets}) == len(targets)
        assert panel["title"] and all(target["datasource"] == source for target in targets)


def test_the_tables_of_xids_and_shares_ask_what_a_test_of_promtool_asks() -> None:
    panels = shipped_boards()["gpulock-node"]["panels"]
    for title, columns in TESTED.items():
        (panel,) = [one for one in panels if title in one["title"]]
        queries = {panel["targets"][column]["expr"] for column in columns}
        assert queries <= {one["expr"] for one in asked()}, title
