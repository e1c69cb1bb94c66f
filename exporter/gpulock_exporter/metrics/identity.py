# SPDX-License-Identifier: Apache-2.0
"""What each device is: on one series, so that all others need nothing but its name."""

from __future__ import annotations

from collections.abc import Sequence

from gpulock_exporter.metrics.families import Metric, gauge, labels
from gpulock_exporter.metrics.labels import LabelledDevice
from gpulock_exporter.state.snapshot import DeviceSnapshot
from gpulock_exporter.telemetry import DeviceTelemetry

GPU = gauge("gpu_info", "What a GPU is; always 1.")
MIG = gauge("mig_info", "What a MIG instance is, and of which GPU; always 1.")


def collect_identity_families(found: Sequence[LabelledDevice], driver: str) -> list[Metric]:
    """Return one series a device that NVML tells of."""
    cards = {one.seen.id: one.seen.uuid for one in found}
    gpus, instances = Metric(GPU), Metric(MIG)
    for one in found:
        values = one.seen.values
        if values is None:
            continue
        if one.seen.instance:
            more = labels(mig_info_labels(one.seen, values, cards))
            instances.values[f"{one.labels},{more}"] = 1
        else:
            gpus.values[f"{one.labels},{labels(gpu_info_labels(values, driver))}"] = 1
    return [gpus, instances]


def gpu_info_labels(values: DeviceTelemetry, driver: str) -> list[tuple[str, str]]:
    """Return the labels of a GPU."""
    return [
        ("name", values.name),
        ("pci_bus_id", values.bus),
        ("minor", number_label(values.minor)),
        ("numa_node", number_label(values.numa)),
        ("driver_version", driver),
        ("mig_mode", flag_label(values.mig)),
        ("persistence_mode", flag_label(values.persistence)),
    ]


def mig_info_labels(
    seen: DeviceSnapshot, values: DeviceTelemetry, cards: dict[str, str]
) -> list[tuple[str, str]]:
    """Return the labels of a MIG instance; `cards` has the identity of each by bus id."""
    return [
        ("parent_uuid", cards.get(values.parent, values.parent)),
        ("gi", number_label(values.gi)),
        ("ci", number_label(values.ci)),
        ("profile", values.profile),
    ]


def number_label(value: int | None) -> str:
    """Return a number as a label, nothing where it is not known."""
    return "" if value is None else str(value)


def flag_label(value: bool | None) -> str:
    """Return a mode as a label."""
    return "" if value is None else "1" if value else "0"
