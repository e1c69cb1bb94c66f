# SPDX-License-Identifier: Apache-2.0
"""What each device is: on one series, so that all others need nothing but its name."""

from __future__ import annotations

from collections.abc import Sequence

from gpulock_exporter.metrics.families import Metric, gauge, labels
from gpulock_exporter.metrics.labels import Labelled
from gpulock_exporter.state.snapshot import Seen
from gpulock_exporter.telemetry import Device

GPU = gauge("gpu_info", "What a GPU is; always 1.")
MIG = gauge("mig_info", "What a MIG instance is, and of which GPU; always 1.")


def collect(found: Sequence[Labelled], driver: str) -> list[Metric]:
    """Return one series a device that NVML tells of."""
    cards = {one.seen.id: one.seen.uuid for one in found}
    gpus, instances = Metric(GPU), Metric(MIG)
    for one in found:
        values = one.seen.values
        if values is None:
            continue
        if one.seen.instance:
            more = labels(instance_pairs(one.seen, values, cards))
            instances.values[f"{one.labels},{more}"] = 1
        else:
            gpus.values[f"{one.labels},{labels(card_pairs(values, driver))}"] = 1
    return [gpus, instances]


def card_pairs(values: Device, driver: str) -> list[tuple[str, str]]:
    """Return the labels of a GPU."""
    return [
        ("name", values.name),
        ("pci_bus_id", values.bus),
        ("minor", number(values.minor)),
        ("numa_node", number(values.numa)),
        ("driver_version", driver),
        ("mig_mode", flag(values.mig)),
        ("persistence_mode", flag(values.persistence)),
    ]


def instance_pairs(seen: Seen, values: Device, cards: dict[str, str]) -> list[tuple[str, str]]:
    """Return the labels of a MIG instance; `cards` has the identity of each by bus id."""
    return [
        ("parent_uuid", cards.get(values.parent, values.parent)),
        ("gi", number(values.gi)),
        ("ci", number(values.ci)),
        ("profile", values.profile),
    ]


def number(value: int | None) -> str:
    """Return a number as a label, nothing where it is not known."""
    return "" if value is None else str(value)


def flag(value: bool | None) -> str:
    """Return a mode as a label."""
    return "" if value is None else "1" if value else "0"
