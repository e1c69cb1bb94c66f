# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportArgumentType=false
# Grafana's builders are typed for Python 3.11, with which `make dashboards` runs.
"""The panels that the dashboards are made of: each shows queries, in a unit, in so much room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = model.DataSourceRef("prometheus", "${datasource}")
WIDTH, HALF, THIRD, QUARTER, SIXTH = 24, 12, 8, 6, 4  # of Grafana's grid
HIGH, LOW = 8, 4
GREEN, YELLOW, RED = "green", "yellow", "red"

Steps = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Query:
    """An expression, and how each of its series is called."""

    expression: str
    legend: str = "__auto"


def lines(
    title: str, unit: str, *queries: Query, about: str = "", width: int = HALF, top: float = 0
) -> timeseries.Panel:
    """Return lines over time; `top` is the greatest value there is, 0 for none."""
    legend = (
        common.VizLegendOptions()
        .display_mode(common_model.LegendDisplayMode.TABLE)
        .placement(common_model.LegendPlacement.RIGHT)
        .show_legend(True)
        .calcs(["mean", "lastNotNull", "max"])
    )
    several = common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .span(width)
        .height(HIGH)
        .fill_opacity(8)
        .legend(legend)
        .tooltip(several.sort(common_model.SortOrder.DESCENDING))
        .targets([ranged(query, ref) for query, ref in lettered(queries)])
    )
    return panel.max(top) if top else panel


def stacked(title: str, unit: str, *queries: Query, about: str = "") -> timeseries.Panel:
    """Return lines that stand on one another."""
    stacking = common.StackingConfig().mode(common_model.StackingMode.NORMAL)
    return lines(title, unit, *queries, about=about).stacking(stacking).fill_opacity(40)


def number(
    title: str, unit: str, query: Query, *, steps: Steps = (), about: str = "", width: int = SIXTH
) -> stat.Panel:
    """Return the value now; it is green, or coloured from the first step that it reaches."""
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .no_value("-")
        .thresholds(thresholds(steps))
        .span(width)
        .height(LOW)
        .targets([instant(query, "A")])
    )


def bars(title: str, unit: str, query: Query, *, steps: Steps, about: str = "") -> bargauge.Panel:
    """Return a bar for each series that there is now."""
    return (
        bargauge.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .no_value("none")
        .orientation(common_model.VizOrientation.HORIZONTAL)
        .thresholds(thresholds(steps))
        .span(HALF)
        .height(HIGH)
        .targets([instant(query, "A")])
    )


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
) -> table.Panel:
    """Return a table with a line for each device, which the labels in `key` name."""
    queries = lettered([column.query(key) for column in columns])
    hidden = [f"Value #{ref}" for column, (_, ref) in zip(columns, queries) if not column.heading]
    hide = dict.fromkeys(("Time", *hidden), True)
    tidy = {"excludeByName": hide, "indexByName": {}, "renameByName": {}}
    panel = (
        table.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(WIDTH)
        .height(height)
        .transformations(
            [
                model.DataTransformerConfig("merge", options={}),
                model.DataTransformerConfig("organize", options=tidy),
            ]
        )
        .targets([instant(query, ref, table=True) for query, ref in queries])
    )
    for column, (_, ref) in zip(columns, queries):
        if column.heading:
            shown = {"displayName": column.heading, "unit": column.unit}
            properties = [model.DynamicConfigValue(name, value) for name, value in shown.items()]
            panel.override_by_name(f"Value #{ref}", properties)
    return panel


def ranged(query: Query, ref: str) -> prometheus.Dataquery:
    """Return a query over the time that is shown."""
    return (
        prometheus.Dataquery()
        .expr(query.expression)
        .legend_format(query.legend)
        .ref_id(ref)
        .datasource(SOURCE)
        .range()
    )


def instant(query: Query, ref: str, *, table: bool = False) -> prometheus.Dataquery:
    """Return a query of the last moment that is shown."""
    shape = PromQueryFormat.TABLE if table else PromQueryFormat.TIME_SERIES
    return (
        prometheus.Dataquery()
        .expr(query.expression)
        .legend_format(query.legend)
        .ref_id(ref)
        .datasource(SOURCE)
        .format(shape)
        .instant()
    )


def lettered(queries: Iterable[Query]) -> list[tuple[Query, str]]:
    """Return the queries with their letters."""
    return [(query, chr(ord("A") + place)) for place, query in enumerate(queries)]


def thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    """Return the colours of values, green below all."""
    found = [model.Threshold(None, GREEN), *(model.Threshold(at, of) for at, of in steps)]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)
