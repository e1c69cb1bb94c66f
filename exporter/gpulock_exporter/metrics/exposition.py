# SPDX-License-Identifier: Apache-2.0
"""The text of families, in both formats of prometheus_client: Prometheus 0.0.4, OpenMetrics 1.0.0.

Most families of a node say the same for hours. So each is rendered by itself, and its text is kept
until one of its samples is another.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from prometheus_client import exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gpulock_exporter.metrics.families import family_name

EVERYTHING: frozenset[str] = frozenset()
END = b"# EOF\n"  # of OpenMetrics alone

# all names here are plain ones; prometheus_client from 0.23 on looks at each letter otherwise
HOW = {"escaping": "allow-utf-8"} if hasattr(openmetrics_exposition, "ALLOWUTF8") else {}
untyped: Any = openmetrics_exposition

FamilyTexts = dict[str, tuple[list[Sample], bytes]]  # of one format, by the family's name


class OneFamily(Collector):
    """A collector that has one family, as prometheus_client wants to be given it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """Return it."""
        return (self._family,)


def render_exposition(
    families: Iterable[Metric],
    openmetrics: bool = False,
    names: Set[str] = EVERYTHING,
    kept: FamilyTexts | None = None,
) -> bytes:
    """Return the text of the families that have a sample.

    `names` are families or samples that are wanted, none meaning all. `kept` has the texts of
    earlier calls for the same format, and gets those of this one; threads may share it.
    """
    known: FamilyTexts = {} if kept is None else kept
    texts: list[bytes] = []
    for one in families:
        if not one.samples or (names and names.isdisjoint((one.name, family_name(one)))):
            continue
        entry = known.get(one.name)
        if entry is None or entry[0] != one.samples:
            known[one.name] = entry = one.samples, render_family(one, openmetrics)
        texts.append(entry[1])
    return b"".join(texts) + (END if openmetrics else b"")


def render_family(family: Metric, openmetrics: bool) -> bytes:
    """Return the text of one family, without the end of the whole."""
    if not openmetrics:
        return exposition.generate_latest(OneFamily(family))
    text: bytes = untyped.generate_latest(OneFamily(family), **HOW)
    return text.removesuffix(END)
