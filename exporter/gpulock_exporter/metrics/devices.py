# SPDX-License-Identifier: Apache-2.0
"""All families of a snapshot.

A MIG instance is a device as a GPU is: it has the families of DEVICE_ROWS. A GPU with instances has
those of BOARD_ROWS alone, so that no sum counts anything twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.metrics_core import Metric

from gpulock.node.devices import SHARE, card_bus_id
from gpulock_exporter.metrics.device_table import (
    BOARD_ROWS,
    DEVICE_ROWS,
    Row,
    device_states,
    read_samples,
)
from gpulock_exporter.metrics.families import Sample, make_family
from gpulock_exporter.metrics.labels import Labels, LabelUser, known_labels, owner_labels
from gpulock_exporter.metrics.node import collect_node_families
from gpulock_exporter.state.snapshot import DeviceSnapshot, NodeSnapshot

Labelled = Sequence[tuple[DeviceSnapshot, Labels]]  # devices, with the labels of each


def collect_families(
    snapshot: NodeSnapshot, label_user: LabelUser = LabelUser.NAME
) -> Iterator[Metric]:
    """Yield all families, those without a value too; `label_user` says how users are named."""
    devices = [
        (one, known_labels([("gpu", one.gpu_label), ("uuid", one.uuid)]))
        for one in snapshot.devices
    ]
    cards = [pair for pair in devices if not pair[0].instance]
    split = {card_bus_id(one.id) for one in snapshot.devices if one.instance}
    claimed = [pair for pair in devices if pair[0].id not in split]
    by_bus = {seen.id: seen for seen, _ in cards}

    def info(seen: DeviceSnapshot) -> Iterable[Sample]:
        labels = info_labels(seen, by_bus.get(seen.bus, seen), snapshot.driver)
        return [(labels, 1)] if seen.told else ()

    def holder(seen: DeviceSnapshot) -> Iterable[Sample]:
        return [(known_labels(owner_labels(seen.owner, label_user)), 1)] if seen.owner else ()

    def sharers(seen: DeviceSnapshot) -> Iterator[Sample]:
        for name, record in seen.sharers.items():
            place = ("share", name.partition(SHARE)[2])
            yield known_labels([*owner_labels(record, label_user), place]), 1

    held = "Which job holds the device."
    state = "Whether it is in a state."
    shared = "Which jobs share the GPU."
    tables: tuple[tuple[Labelled, Sequence[Row]], ...] = (
        (devices, (("info", "What a device is.", info), ("state", state, device_states))),
        (claimed, (("lock_info", held, holder),)),
        (cards, (("share_info", shared, sharers),)),  # of its own: joins need one series each
        (claimed, DEVICE_ROWS),
        (cards, BOARD_ROWS),
    )
    for having, rows in tables:
        for name, meaning, source in rows:
            samples = [
                ({**own, **more} if more else own, value)
                for seen, own in having
                for more, value in read_samples(seen, source)
            ]
            yield make_family(f"gpu_{name}", meaning, samples)
    yield from collect_node_families(snapshot)


def info_labels(seen: DeviceSnapshot, card: DeviceSnapshot, driver: str) -> Labels:
    """Return what a device is; `card` is its own, or that of an instance where it is told."""
    pairs: dict[str, object] = {"name": card.name, "driver_version": driver}
    if seen.instance:
        parent = {"parent_uuid": card.uuid if card is not seen else seen.bus}
        pairs |= {**parent, "gi": seen.gi, "ci": seen.ci, "profile": seen.profile}
    else:
        pairs |= {"pci_bus_id": seen.bus, "minor": seen.minor, "numa_node": seen.numa}
        pairs |= {"mig_mode": seen.mig, "persistence_mode": seen.persistence}
    return known_labels(
        (name, str(int(value) if isinstance(value, bool) else value))
        for name, value in pairs.items()
        if value is not None
    )
