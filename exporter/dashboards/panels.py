# SPDX-License-Identifier: Apache-2.0
"""The panels that the dashboards are made of: each shows queries, in a unit, in so much room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Panel = dict[str, Any]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HALF, QUARTER, SIXTH = 24, 12, 6, 4  # of Grafana's grid
HIGH, LOW = 8, 4
GREEN, YELLOW, RED = "green", "yellow", "red"

# from a cell of a table to the view of what it names
LINKS = {
    name: f"/d/gpulock-{board}?var-{name}=${{__value.raw}}&${{__url_time_range}}"
    "&${datasource:queryparam}"
    for name, board in (("instance", "node"), ("job_id", "job"))
}

Steps = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Query:
    """An expression, and how each of its series is called."""

    expression: str
    legend: str = "__auto"


def panel(kind: str, title: str, about: str, size: tuple[int, int], targets: list[Panel]) -> Panel:
    """Return what every panel has; `size` is its width and height, the board says where."""
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": SOURCE,
        "gridPos": {"w": size[0], "h": size[1]},
        "targets": targets,
        "fieldConfig": {"defaults": {}, "overrides": []},
    }


def lines(
    title: str, unit: str, *queries: Query, about: str = "", width: int = HALF, top: float = 0
) -> Panel:
    """Return lines over time; `top` is the greatest value there is, 0 for none."""
    result = panel("timeseries", title, about, (width, HIGH), ranged(queries))
    shown = {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}
    result["fieldConfig"]["defaults"] = {**shown, "max": top} if top else shown
    result["options"] = {
        "legend": {
            "displayMode": "table",
            "placement": "right",
            "showLegend": True,
            "calcs": ["mean", "lastNotNull", "max"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return result


def stacked(title: str, unit: str, *queries: Query, about: str = "") -> Panel:
    """Return lines that stand on one another."""
    result = lines(title, unit, *queries, about=about)
    custom = {"fillOpacity": 40, "stacking": {"mode": "normal"}}
    result["fieldConfig"]["defaults"]["custom"] = custom
    return result


def number(
    title: str, unit: str, query: Query, *, steps: Steps = (), about: str = "", width: int = SIXTH
) -> Panel:
    """Return the value now; it is green, or coloured from the first step that it reaches."""
    result = panel("stat", title, about, (width, LOW), instant([query]))
    colours = {"unit": unit, "noValue": "-", "thresholds": thresholds(steps)}
    result["fieldConfig"]["defaults"] = colours
    return result


def bars(title: str, unit: str, query: Query, *, steps: Steps = (), about: str = "") -> Panel:
    """Return a bar for each series that there is now."""
    result = panel("bargauge", title, about, (HALF, HIGH), instant([query]))
    colours = {"unit": unit, "min": 0, "noValue": "none", "thresholds": thresholds(steps)}
    result["fieldConfig"]["defaults"] = colours
    result["options"] = {"orientation": "horizontal", "displayMode": "gradient"}
    return result


@dataclass(frozen=True)
class Column:
    """A column of a table: what has a value for each device, how it is headed, in which unit.

    `labels` are columns of their own; without a heading the value itself is not shown.
    """

    series: str
    heading: str = ""
    unit: str = "none"
    labels: Sequence[str] = ()

    def query(self, key: Sequence[str]) -> Query:
        """Return the query; what is not asked for would keep lines of one device apart."""
        return Query(f"max by ({', '.join((*key, *self.labels))}) ({self.series})")


def rows(
    title: str,
    key: Sequence[str],
    columns: Sequence[Column],
    *,
    about: str = "",
    height: int = HIGH,
) -> Panel:
    """Return a table with a line for each device, which the labels in `key` name."""
    targets = instant([column.query(key) for column in columns], shape="table")
    result = panel("table", title, about, (WIDTH, height), targets)
    hidden = {"Time": True}
    for column, target in zip(columns, targets):
        name = f"Value #{target['refId']}"
        if not column.heading:
            hidden[name] = True
            continue
        shown = {"displayName": column.heading, "unit": column.unit}
        result["fieldConfig"]["overrides"].append(override(name, shown))
    for name in (*key, *(label for column in columns for label in column.labels)):
        if name in LINKS:
            links = [{"title": "show", "url": LINKS[name]}]
            result["fieldConfig"]["overrides"].append(override(name, {"links": links}))
    tidy = {"excludeByName": hidden, "indexByName": {}, "renameByName": {}}
    result["transformations"] = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": tidy},
    ]
    return result


def override(name: str, values: dict[str, Any]) -> Panel:
    """Return how the column of a name is shown."""
    properties = [{"id": key, "value": value} for key, value in values.items()]
    return {"matcher": {"id": "byName", "options": name}, "properties": properties}


def ranged(queries: Iterable[Query]) -> list[Panel]:
    """Return queries over the time that is shown."""
    return [{**target(query, place), "range": True} for place, query in enumerate(queries)]


def instant(queries: Iterable[Query], shape: str = "time_series") -> list[Panel]:
    """Return queries of the last moment that is shown."""
    return [
        {**target(query, place), "instant": True, "range": False, "format": shape}
        for place, query in enumerate(queries)
    ]


def target(query: Query, place: int) -> Panel:
    """Return a query with its letter."""
    return {
        "expr": query.expression,
        "legendFormat": query.legend,
        "refId": chr(ord("A") + place),
        "datasource": SOURCE,
    }


def thresholds(steps: Steps) -> Panel:
    """Return the colours of values, green below all."""
    every: list[tuple[float | None, str]] = [(None, GREEN), *steps]
    return {
        "mode": "absolute",
        "steps": [{"value": at, "color": colour} for at, colour in every],
    }
