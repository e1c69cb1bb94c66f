# SPDX-License-Identifier: Apache-2.0
"""A dashboard from rows of panels, and the choices at its top, as Grafana imports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dashboards.panels import SOURCE, WIDTH, Panel

TAG = "gpulock"
SCHEMA = 36  # a later Grafana migrates it; an older one does not load a newer one
ON_TIME_RANGE, NATURAL, SHARED_CROSSHAIR = 2, 7, 1  # Grafana's numbers
Row = tuple[str, Sequence[Panel]]


def choice(name: str, label: str, query: str, *, everything: bool = False) -> dict[str, Any]:
    """Return a choice among the values of a label; `everything`: several, and all at first."""
    result: dict[str, Any] = {
        "type": "query",
        "name": name,
        "label": label,
        "query": query,
        "datasource": SOURCE,
        "refresh": ON_TIME_RANGE,
        "sort": NATURAL,
    }
    if everything:
        every = {"text": "All", "value": "$__all", "selected": True}
        result |= {"includeAll": True, "multi": True, "allValue": ".*", "current": every}
    return result


def annotation(name: str, expression: str, text: str) -> dict[str, Any]:
    """Return marks over time; the expression's values are when each was, in milliseconds."""
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": expression,
        "titleFormat": text,
        "useValueForTime": True,
    }


def board(
    uid: str,
    title: str,
    about: str,
    choices: Sequence[dict[str, Any]],
    rows: Sequence[Row],
    annotations: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return a dashboard."""
    source = {"type": "datasource", "name": "datasource", "label": "data", "query": "prometheus"}
    link = {"title": TAG, "type": "dashboards", "tags": [TAG], "asDropdown": True, "keepTime": True}
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": [TAG],
        "schemaVersion": SCHEMA,
        "editable": True,
        "graphTooltip": SHARED_CROSSHAIR,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [source, *choices]},
        "annotations": {"list": [*annotations]},
        "links": [link],
        "panels": [{**one, "id": number} for number, one in enumerate(placed(rows), start=1)],
    }


def placed(rows: Sequence[Row]) -> Iterator[Panel]:
    """Yield the head of each row and its panels, from left to right in Grafana's grid."""
    y = 0
    for name, panels in rows:
        head = {"type": "row", "title": name, "collapsed": False, "panels": []}
        yield {**head, "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}}
        x, y, high = 0, y + 1, 0
        for one in panels:
            size = one["gridPos"]
            if x + size["w"] > WIDTH:
                x, y, high = 0, y + high, 0
            yield {**one, "gridPos": {**size, "x": x, "y": y}}
            x, high = x + size["w"], max(high, size["h"])
        y += high


def queries(found: dict[str, Any]) -> list[str]:
    """Return every expression of a dashboard, as it is written in it."""
    marks = [one["expr"] for one in found["annotations"]["list"]]
    panels = found["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())] + marks
