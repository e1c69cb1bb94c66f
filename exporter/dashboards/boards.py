# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportArgumentType=false
# Grafana's builders are typed for Python 3.11, with which `make dashboards` runs.
"""A dashboard from rows of panels, and the choices at its top."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog import builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from dashboards.panels import SOURCE

TAG = "gpulock"
Row = tuple[str, Sequence[builder.Builder[model.Panel]]]


def choice(
    name: str, label: str, query: str, *, everything: bool = False
) -> dashboard.QueryVariable:
    """Return a choice among the values of a label; `everything`: several, and all at first."""
    found = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NATURAL_ASC)
    )
    if everything:
        every = model.VariableOption(text="All", value="$__all", selected=True)
        found = found.include_all(True).multi(True).all_value(".*").current(every)
    return found


def board(
    uid: str,
    title: str,
    about: str,
    choices: Sequence[dashboard.QueryVariable],
    rows: Sequence[Row],
) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags([TAG])
        .time("now-3h", "now")
        .refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("gpulock")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("data").type("prometheus"))
    )
    for one in choices:
        made.with_variable(one)
    for name, panels in rows:
        made.with_row(dashboard.Row(name))
        for panel in panels:
            made.with_panel(panel)
    found: dict[str, Any] = json.loads(JSONEncoder().encode(made.build()))
    found["annotations"] = {"list": []}
    for number, panel in enumerate(found["panels"], start=1):
        panel["id"] = number
    return found


def queries(found: dict[str, Any]) -> list[str]:
    """Return every expression of a dashboard, as it is written in it."""
    return [target["expr"] for panel in found["panels"] for target in panel.get("targets", ())]
