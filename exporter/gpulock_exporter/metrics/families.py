# SPDX-License-Identifier: Apache-2.0
"""A family of metrics: what its labels may hold, and its text, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gpulock.store.owner import Owner

# Prometheus's own parser takes a NUL for the end of the text, so no control character but a new
# line is written; a surrogate is a byte that is no UTF-8, or half a character of JSON
REPLACED = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000))
} | {ord("\n"): "\n"}
LONGEST_LABEL = 256  # characters of a value

Labels = dict[str, str]
Sample = tuple[Labels, float]
PROCESS = ProcessCollector(registry=None)  # `process_*` of this process


class LabelUser(Enum):
    """What the label `user` holds (LABEL_USER)."""

    NAME = "name"
    UID = "uid"
    NONE = "none"

    def of(self, record: Owner) -> str:
        """Return the label's value for an owner, empty for none."""
        if self is LabelUser.NAME:
            return record.user
        return str(record.uid) if self is LabelUser.UID else ""


def owner_labels(record: Owner, label_user: LabelUser) -> list[tuple[str, str]]:
    """Return whose a claim is; the record's comment and paths stay where they are."""
    return [
        ("scheduler", record.scheduler),
        ("job_id", record.job_id),
        ("task_id", record.task_id),
        ("user", label_user.of(record)),
        ("queue", record.queue),
    ]


def known_labels(pairs: Iterable[tuple[str, str]]) -> Labels:
    """Return labels that can be written, those without a value left out."""
    return {name: value[:LONGEST_LABEL].translate(REPLACED) for name, value in pairs if value}


def counters_by_suffix(counters: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the counters whose name begins with a prefix, by the rest of it."""
    return {
        name[len(prefix) :]: value for name, value in counters.items() if name.startswith(prefix)
    }


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
