# SPDX-License-Identifier: Apache-2.0
"""The labels of a device, written once a snapshot, and how its owner is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from gpulock.store.owner import Owner
from gpulock_exporter.metrics.families import Family, Metric, counter, gauge, labels
from gpulock_exporter.state.snapshot import DeviceSnapshot

Value = Callable[[DeviceSnapshot], float | None]
Several = Callable[[DeviceSnapshot], Iterable[tuple[str, float]]]


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


@dataclass(frozen=True, slots=True)
class LabelledDevice:
    """A device with its labels as they are written."""

    seen: DeviceSnapshot
    labels: str


def label_devices(devices: Sequence[DeviceSnapshot]) -> list[LabelledDevice]:
    """Return the devices with the labels that each of their series has."""
    return [LabelledDevice(one, labels([("gpu", one.name), ("uuid", one.uuid)])) for one in devices]


@dataclass(frozen=True, slots=True)
class FamilyPair:
    """A family of GPUs, and its twin of MIG instances: board facts have none."""

    gpu: Family
    mig: Family | None

    def metrics(self, found: Sequence[LabelledDevice], value: Value) -> list[Metric]:
        """Return both families with a value for each device that has one."""
        return self.all(found, lambda one: _single_value(value(one)))

    def all(self, found: Sequence[LabelledDevice], values: Several) -> list[Metric]:
        """Return both families with several values a device, each with labels of its own."""
        gpus = Metric(self.gpu)
        instances = Metric(self.mig) if self.mig else None
        for one in found:
            metric = instances if one.seen.instance else gpus
            if metric is None:
                continue
            for more, number in values(one.seen):
                metric.values[f"{one.labels},{more}" if more else one.labels] = number
        return [gpus, instances] if instances else [gpus]


def _single_value(value: float | None) -> list[tuple[str, float]]:
    return [] if value is None else [("", value)]


def gauge_pair(name: str, meaning: str) -> FamilyPair:
    """Return a pair of gauges; `{device}` in the meaning is what it is about."""
    return FamilyPair(
        gauge(f"gpu_{name}", meaning.format(device="GPU")),
        gauge(f"mig_{name}", meaning.format(device="MIG instance")),
    )


def counter_pair(name: str, meaning: str) -> FamilyPair:
    """Return a pair of counters."""
    return FamilyPair(
        counter(f"gpu_{name}", meaning.format(device="GPU")),
        counter(f"mig_{name}", meaning.format(device="MIG instance")),
    )


def board_gauge(name: str, meaning: str) -> FamilyPair:
    """Return a gauge of the whole board, which is never an instance's."""
    return FamilyPair(gauge(f"gpu_{name}", meaning), None)


def board_counter(name: str, meaning: str) -> FamilyPair:
    """Return a counter of the whole board."""
    return FamilyPair(counter(f"gpu_{name}", meaning), None)
