# SPDX-License-Identifier: Apache-2.0
"""What the exporter says of each card: a scrape in Prometheus's text, by UUID. Pure.

Read by hand, so that the check needs nothing beyond what the exporter itself does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
PREFIX = "gpulock_gpu_"
INFO = "info"


class Card(NamedTuple):
    """One card: the labels of its `info`, and its values by name.

    A name is the metric's without `gpulock_gpu_`, with its further labels: `ecc_errors_total` of
    type corrected and location dram is `ecc_errors_total corrected dram`, by the labels' names.
    """

    info: Mapping[str, str]
    values: Mapping[str, float]


def parse_cards(text: str) -> dict[str, Card]:
    """Return the cards of a scrape by UUID; what is of no card is left out."""
    infos: dict[str, dict[str, str]] = {}
    values: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        matched = _LINE.match(line)
        if matched is None or not matched[1].startswith(PREFIX):
            continue
        labels = parse_labels(matched[2] or "")
        uuid = labels.pop("uuid", "")
        if matched[1] == PREFIX + INFO:
            infos[uuid] = labels
            continue
        labels.pop("gpu", None)
        name = " ".join([matched[1].removeprefix(PREFIX), *(labels[key] for key in sorted(labels))])
        values.setdefault(uuid, {})[name] = float(matched[3])
    return {uuid: Card(info, values.get(uuid, {})) for uuid, info in infos.items()}


def parse_labels(text: str) -> dict[str, str]:
    """Return labels as they were before they were written."""
    return {
        name: _ESCAPED.sub(lambda m: "\n" if m[1] == "n" else m[1], value)
        for name, value in _LABEL.findall(text)
    }


def single(text: str, metric: str) -> float | None:
    """Return the value of a metric that has no labels, None where there is none."""
    matched = re.search(rf"(?m)^{re.escape(metric)} (\S+)$", text)
    return float(matched[1]) if matched else None
