# SPDX-License-Identifier: Apache-2.0
"""A family of metrics, and the text that Prometheus reads, format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpulock_exporter.metrics.labels import label_text

Sample = tuple[str, float]  # labels as they are written, value


class Family(NamedTuple):
    """All samples of one name: a counter where that ends in `_total`, else a gauge."""

    name: str
    meaning: str
    samples: Sequence[Sample]


def node_family(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Family:
    """Return a family of the node, of one label, with its values by that."""
    samples = [(label_text([(label, of)]), value) for of, value in values.items()]
    return Family(f"gpulock_{name}", meaning, samples)


def node_value(name: str, meaning: str, value: float | None) -> Family:
    """Return a family of the node as a whole, without a sample where its value is not known."""
    return Family(f"gpulock_{name}", meaning, [] if value is None else [("", value)])


def render_families(families: Iterable[Family]) -> bytes:
    """Return the text of the families that have a sample."""
    lines: list[str] = []
    for name, meaning, samples in families:
        if samples:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n")
        for labels, value in samples:
            series = f"{name}{{{labels}}}" if labels else name
            lines.append(f"{series} {float(value)!r}\n")
    return "".join(lines).encode()
