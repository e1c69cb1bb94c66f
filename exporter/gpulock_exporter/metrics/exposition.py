# SPDX-License-Identifier: Apache-2.0
"""The text that Prometheus reads, format 0.0.4, by prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Set

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gpulock_exporter.metrics.families import family_name

EVERYTHING: frozenset[str] = frozenset()


class Families(Collector):
    """A collector that has these families, as prometheus_client wants to be given them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


PROCESS = ProcessCollector(registry=None)


def collect_process_families() -> Iterable[Metric]:
    """Return the families `process_*` of this process."""
    return PROCESS.collect()


def render_exposition(families: Iterable[Metric], names: Set[str] = EVERYTHING) -> bytes:
    """Return the text of the families that have a sample.

    `names` are families or samples that are wanted, none meaning all.
    """
    return generate_latest(
        Families(
            one
            for one in families
            if one.samples and not (names and names.isdisjoint((one.name, family_name(one))))
        )
    )
