# SPDX-License-Identifier: Apache-2.0
"""The dashboards that are shipped speak of what there is, and lie in Grafana's grid."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.dashboards import board_queries, shipped_boards
from tests.unit.exporter.metrics.test_rules import asked, families, named

SERIES = re.compile(r"\b(?:gpulock[_:][\w:]+|ALERTS)\b")


@pytest.fixture(scope="module", params=sorted(shipped_boards()))
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Give each dashboard."""
    return shipped_boards()[request.param]


def test_a_dashboard_speaks_of_series_that_there_are(board: dict[str, Any]) -> None:
    spoken = {name for text in board_queries(board) for name in SERIES.findall(text)}
    assert spoken - families() - set(named("record")) - {"ALERTS"} == set()


def test_a_dashboard_asks_the_source_that_is_chosen_and_no_other(board: dict[str, Any]) -> None:
    asked = [target for panel in board["panels"] for target in panel.get("targets", ())]
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert asked
    assert all(target["datasource"] == source for target in asked)


def test_a_dashboards_choices_are_used(board: dict[str, Any]) -> None:
    text = " ".join([*board_queries(board), json.dumps(board["templating"])])
    for choice in board["templating"]["list"]:
        name = choice["name"]
        assert f"${name}" in text or f"${{{name}}}" in json.dumps(board["panels"]), name


def test_panels_and_queries_have_names_of_their_own(board: dict[str, Any]) -> None:
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in board["panels"]:
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)
        assert panel["title"]


def test_each_dashboard_shows_what_is_held_and_idle(board: dict[str, Any]) -> None:
    assert any("gpu_hold:idle_seconds" in text for text in board_queries(board))


def test_the_panel_of_xids_asks_what_a_test_of_promtool_asks() -> None:
    (panel,) = [one for one in boards_panels("gpulock-node") if "XID" in one["title"]]
    (query,) = [target["expr"] for target in panel["targets"]]
    assert query in {one["expr"] for one in asked()}


@pytest.mark.parametrize(("title", "columns"), [("Shared GPUs", (1, 2, 3)), ("Holders", (0, 1))])
def test_the_tables_of_shares_ask_what_a_test_of_promtool_asks(
    title: str, columns: tuple[int, ...]
) -> None:
    (panel,) = [one for one in boards_panels("gpulock-node") if one["title"] == title]
    queries = [panel["targets"][column]["expr"] for column in columns]
    assert {*queries} <= {one["expr"] for one in asked()}


@pytest.mark.parametrize("name", sorted(shipped_boards()))
def test_utilization_over_time_is_drawn_from_counters(name: str) -> None:
    drawn = [one for one in boards_panels(name) if one["title"].startswith("GPU utilization")]
    assert drawn
    for text in [target["expr"] for one in drawn for target in one["targets"]]:
        assert text.count("rate(") == 2 and "utilization_ratio" not in text


def boards_panels(name: str) -> list[dict[str, Any]]:
    """Return the panels of a dashboard."""
    found: list[dict[str, Any]] = shipped_boards()[name]["panels"]
    return found
