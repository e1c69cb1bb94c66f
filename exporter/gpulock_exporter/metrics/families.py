# SPDX-License-Identifier: Apache-2.0
"""A family of metrics, a `Metric` of prometheus_client, made by its name, filled by device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpulock_exporter.metrics.labels import Labels, known_labels
from gpulock_exporter.state.snapshot import DeviceSnapshot

TOTAL = "_total"
UNITS = ("seconds", "bytes", "ratio", "joules", "watts", "celsius", "hertz")

TWIN = "{device}"  # in a meaning: the family has a twin of MIG instances, which board facts lack

DeviceLabels = Sequence[tuple[DeviceSnapshot, Labels]]
Several = Callable[[DeviceSnapshot], Iterable[tuple[Labels, float]]]


def make_family(name: str, meaning: str) -> Metric:
    """Return the family `gpulock_<name>`: a counter where that ends in `_total`, else a gauge."""
    unit = name.removesuffix(TOTAL).rpartition("_")[2]
    kind = CounterMetricFamily if name.endswith(TOTAL) else GaugeMetricFamily
    return kind(f"gpulock_{name}", meaning, unit=unit if unit in UNITS else "")


def family_name(family: Metric) -> str:
    """Return the name of a family's samples."""
    return family.name + TOTAL if family.type == "counter" else family.name


def add_samples(family: Metric, own: Labels, values: Iterable[tuple[Labels, float]]) -> None:
    """Add the samples of a device, whose labels are `own`, to a family."""
    name = family_name(family)
    for more, value in values:
        family.add_sample(name, {**own, **more} if more else own, value)


def collect_pair(found: DeviceLabels, name: str, meaning: str, values: Several) -> list[Metric]:
    """Return a family of GPUs, and its twin of MIG instances where it has one."""
    pair = [make_family(f"gpu_{name}", meaning.format(device="GPU"))]
    if TWIN in meaning:
        pair.append(make_family(f"mig_{name}", meaning.format(device="MIG instance")))
    for seen, own in found:
        place = int(bool(seen.instance))
        if place < len(pair):
            add_samples(pair[place], own, values(seen))
    return pair


def collect_identity_families(found: DeviceLabels, driver: str) -> list[Metric]:
    """Return what each device is, on one series, for those that NVML tells of."""
    cards = {seen.id: seen.uuid for seen, _ in found}
    gpus = make_family("gpu_info", "What a GPU is; always 1.")
    instances = make_family("mig_info", "What a MIG instance is, and of which GPU; always 1.")
    for seen, own in found:
        if not seen.told:
            continue
        if seen.instance:
            pairs: dict[str, object] = {
                "parent_uuid": cards.get(seen.parent, seen.parent),
                "gi": seen.gi,
                "ci": seen.ci,
                "profile": seen.profile,
            }
        else:
            pairs = {
                "name": seen.name,
                "pci_bus_id": seen.bus,
                "minor": seen.minor,
                "numa_node": seen.numa,
                "driver_version": driver,
                "mig_mode": seen.mig,
                "persistence_mode": seen.persistence,
            }
        texts = [
            (name, str(int(value) if isinstance(value, bool) else value))
            for name, value in pairs.items()
            if value is not None
        ]
        add_samples(instances if seen.instance else gpus, own, [(known_labels(texts), 1)])
    return [gpus, instances]
