# SPDX-License-Identifier: Apache-2.0
"""A family of metrics, and the text that Prometheus reads, format 0.0.4, by prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gpulock_exporter.metrics.labels import Labels, known_labels

Sample = tuple[Labels, float]
PROCESS = ProcessCollector(registry=None)  # `process_*` of this process


class Families(Collector):
    """A collector that has these families, as prometheus_client wants to be given them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


def make_family(name: str, meaning: str, samples: Iterable[Sample]) -> Metric:
    """Return the family `gpulock_<name>`: a counter where that ends in `_total`, else a gauge."""
    whole = f"gpulock_{name}"
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(whole, meaning)
    for labels, value in samples:
        family.add_sample(whole, labels, value)
    return family


def node_family(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a family of the node, of one label, with its values by that."""
    samples = [(known_labels([(label, of)]), value) for of, value in values.items()]
    return make_family(name, meaning, samples)


def node_value(name: str, meaning: str, value: float | None) -> Metric:
    """Return a family of the node as a whole, without a sample where its value is not known."""
    return make_family(name, meaning, () if value is None else [({}, value)])


def render_families(families: Iterable[Metric]) -> bytes:
    """Return the text of the families that have a sample."""
    return generate_latest(Families(one for one in families if one.samples))
