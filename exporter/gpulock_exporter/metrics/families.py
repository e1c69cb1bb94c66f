# SPDX-License-Identifier: Apache-2.0
"""A family of metrics, a `Metric` of prometheus_client, made by its name, filled by device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpulock_exporter.metrics.labels import Labels, known_labels
from gpulock_exporter.state.snapshot import DeviceSnapshot

TOTAL = "_total"
UNITS = ("seconds", "bytes", "ratio", "joules", "watts", "celsius", "hertz")

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


def collect_family(devices: DeviceLabels, name: str, meaning: str, values: Several) -> Metric:
    """Return a family of devices."""
    family = make_family(f"gpu_{name}", meaning)
    for seen, own in devices:
        add_samples(family, own, values(seen))
    return family


def collect_info_family(devices: DeviceLabels, driver: str) -> Metric:
    """Return what each device is, on one series, for those that NVML tells of."""
    cards = {seen.id: seen for seen, _ in devices if not seen.instance}

    def labels(seen: DeviceSnapshot) -> Iterator[tuple[Labels, float]]:
        if not seen.told:
            return
        card = cards.get(seen.parent, seen)
        pairs: dict[str, object] = {"name": card.name, "driver_version": driver}
        if seen.instance:
            parent = {"parent_uuid": card.uuid if card is not seen else seen.parent}
            pairs |= {**parent, "gi": seen.gi, "ci": seen.ci, "profile": seen.profile}
        else:
            pairs |= {"pci_bus_id": seen.bus, "minor": seen.minor, "numa_node": seen.numa}
            pairs |= {"mig_mode": seen.mig, "persistence_mode": seen.persistence}
        texts = [
            (name, str(int(value) if isinstance(value, bool) else value))
            for name, value in pairs.items()
            if value is not None
        ]
        yield known_labels(texts), 1

    return collect_family(devices, "info", "What a device is; always 1.", labels)
