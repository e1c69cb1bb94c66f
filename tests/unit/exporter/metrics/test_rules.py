# SPDX-License-Identifier: Apache-2.0
"""The rules and dashboards that are shipped speak of what there is, and are tested."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml
from gpulock_exporter.metrics.exposition import collect_families
from gpulock_exporter.state.snapshot import ExporterHealth, Moment, NodeSnapshot
from prometheus_client import Metric

from gpulock.cli.commands import NAMES
from gpulock.daemon.health.findings import HARDWARE
from tests.support.dashboards import board_queries, shipped_boards

ROOT = Path(__file__).resolve().parents[4]
RULES = ROOT / "exporter" / "rules"
NAME = re.compile(r"\bgpulock_[a-z_]+\b")
SEVERITIES = {"critical", "warning", "info"}


@cache
def rules() -> tuple[dict[str, Any], ...]:
    """Return every rule that is shipped."""
    files = [yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(RULES.glob("*.yml"))]
    return tuple(rule for file in files for group in file["groups"] for rule in group["rules"])


@cache
def asked() -> tuple[dict[str, Any], ...]:
    """Return every test of an expression that promtool runs."""
    files = [
        yaml.load(path.read_text(), yaml.CSafeLoader)
        for path in (ROOT / "tests/rules").glob("*.yml")
    ]
    return tuple(one for file in files for of in file["tests"] for one in of["promql_expr_test"])


def families() -> set[str]:
    """Return the name of every metric of the exporter."""
    nothing = NodeSnapshot(Moment(0.0, 0.0), (), None, "", {}, None, ExporterHealth())
    return {sample_name(family) for family in collect_families(nothing)}


def sample_name(family: Metric) -> str:
    """Return what the samples of a family are called."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def named(kind: str) -> dict[str, dict[str, Any]]:
    """Return the rules of a kind, `alert` or `record`, by name."""
    return {rule[kind]: rule for rule in rules() if kind in rule}


def test_every_series_that_rules_their_tests_and_the_documentation_name_is_made() -> None:
    files = (*RULES.glob("*.yml"), *(ROOT / "tests/rules").iterdir(), ROOT / "docs/metrics.md")
    text = "".join(path.read_text() for path in files)
    spoken = {*NAME.findall(text), *re.findall(r"\bgpulock:\w+:\w[\w:]*", text)}
    whole = {name for name in spoken if not name.endswith("_")}
    assert whole - families() - set(named("record")) == set()
    assert len(named("alert")) + len(named("record")) == len(rules()), "each has a name of its own"


@pytest.mark.parametrize("alert", sorted(named("alert")))
def test_an_alert_says_how_bad_it_is_and_begins_with_what_to_type(alert: str) -> None:
    rule = named("alert")[alert]
    said = rule["annotations"]
    assert rule["labels"]["severity"] in SEVERITIES
    assert set(said) == {"summary", "description"}
    assert "{{ $labels.instance }}" in said["summary"]
    assert said["description"].startswith("Type `")
    assert {*re.findall(r"`gpulock ([a-z]+)", said["description"])} <= {*NAMES}


@pytest.mark.parametrize("alert", sorted(named("alert")))
def test_an_alert_is_tested_to_fire_and_to_be_quiet(alert: str) -> None:
    own = [one for one in asked() if f'alertname="{alert}"' in one["expr"]]
    assert [one for one in own if one.get("exp_samples")]
    assert [one for one in own if not one.get("exp_samples")]


@pytest.mark.parametrize("record", sorted(named("record")))
def test_what_is_recorded_is_tested(record: str) -> None:
    whole = re.compile(rf"(?<![\w:]){re.escape(record)}(?![\w:])")
    assert [one for one in asked() if whole.search(one["expr"]) and one.get("exp_samples")]


def codes_of(alert: str, how: str) -> set[int]:
    """Return the XIDs that an alert names, by `=~` or `!~`."""
    (found,) = re.findall(rf'xid{how}"([\d|]+)"', named("alert")[alert]["expr"])
    codes = [int(code) for code in found.split("|")]
    assert len(set(codes)) == len(codes)
    return set(codes)


def test_the_xids_that_quarantine_counts_are_those_of_the_critical_alert() -> None:
    critical, application = (
        codes_of(f"GpulockXid{of}", "=~") for of in ("Critical", "OfApplication")
    )
    assert critical == set(HARDWARE)
    assert not critical & application
    assert codes_of("GpulockXid", "!~") == critical | application
    text = (ROOT / "docs/quarantine.md").read_text()
    (told,) = re.findall(r"\*\*XIDs that count\*\* are these: ([\d ]+)\.", text)
    assert {int(code) for code in told.split()} == critical


def test_rules_and_dashboards_are_in_the_wheel() -> None:
    built = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = built["targets"]["wheel"]["force-include"]
    assert included["exporter/rules"] == "gpulock/share/rules"
    boards = sorted((ROOT / "exporter/dashboards").glob("*.json"))
    assert boards
    for board in boards:
        place = f"exporter/dashboards/{board.name}"
        assert included[place] == f"gpulock/share/dashboards/{board.name}"


def test_the_documentation_has_every_metric_and_alert_and_no_others() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    assert set(re.findall(r"`(gpulock_[a-z_]+[a-z])`", text)) == families()
    told = dict(re.findall(r"^\| `(Gpulock\w+)` \| .* \| (\w+) \|$", text, re.MULTILINE))
    assert told == {name: rule["labels"]["severity"] for name, rule in named("alert").items()}


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


def test_a_dashboard_shows_what_idles_draws_use_from_counters_and_obeys_its_choices(
    board: dict[str, Any],
) -> None:
    assert any("gpu_hold:idle_seconds" in text for text in board_queries(board))
    drawn = [one for one in board["panels"] if one["title"].startswith("GPU utilization")]
    assert drawn
    for text in [target["expr"] for panel in drawn for target in panel["targets"]]:
        assert text.count("rate(") == 2 and "utilization_ratio" not in text
    for choice in board["templating"]["list"]:
        text = str([*board_queries(board), board["panels"], board["templating"]])
        assert re.search(rf"\$\{{?{choice['name']}\b", text), choice["name"]


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
