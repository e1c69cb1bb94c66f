# SPDX-License-Identifier: Apache-2.0
"""All families of a snapshot, of its devices, of the node and of the exporter itself. Pure.

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
from gpulock_exporter.metrics.families import (
    Labels,
    LabelUser,
    Sample,
    counters_by_suffix,
    known_labels,
    make_family,
    node_family,
    node_value,
    owner_labels,
)
from gpulock_exporter.state.snapshot import DeviceSnapshot, NodeSnapshot

REAPED_KEY, CLAIMS_KEY = "reaped_", "claims_"  # of gpulock.store.events
TIMEOUTS_KEY, WAITED_KEY = "lock_timeouts", "lock_wait_seconds"
DROPPED_KEY = "history_dropped"
LOCK_TIMEOUT = "lock_timeout"  # the result of a claim that never got in

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
        return [(labels, 1)] if seen.answered else ()

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


def collect_node_families(snapshot: NodeSnapshot) -> Iterator[Metric]:
    """Yield the families of the node, of what its hooks have counted, and of the exporter."""
    counters = snapshot.counters
    claims = counters_by_suffix(counters, CLAIMS_KEY)
    if counters:  # `increase` needs a value before the first claim that times out, or is lost
        claims[LOCK_TIMEOUT] = counters.get(TIMEOUTS_KEY, 0.0)
    yield node_family("gpus", "Devices in each state.", "state", snapshot.states or {})
    yield node_value(
        "reconcile_timestamp_seconds", "When all owners were last judged.", snapshot.reconciled
    )
    yield node_family(
        "locks_reaped_total",
        "Locks of owners that were proven dead.",
        "proof",
        counters_by_suffix(counters, REAPED_KEY),
    )
    yield node_family("claims_total", "Claims by how they ended, in this boot.", "result", claims)
    yield node_value("waiting", "Calls in the queue of users' claims.", len(snapshot.waiting))
    yield node_value(
        "lock_wait_seconds_total", "Time that claims waited for the gate.", counters.get(WAITED_KEY)
    )
    yield node_value(
        "history_dropped_total",
        "Finished claims that have no line in the history.",
        counters.get(DROPPED_KEY, 0.0 if counters else None),
    )
    yield make_family(
        "nvswitch_errors_total",
        "SXid errors of an NVSwitch, in this boot.",
        [
            (known_labels([("pci_bus_id", bus), ("sxid", str(number))]), times)
            for (bus, number), (times, _) in snapshot.switch_errors.items()
        ],
    )
    health = snapshot.health
    yield node_value("nvml_up", "Whether the driver answers: its values are fresh.", health.nvml_up)
    yield node_value("nvml_workers_abandoned", "Workers that cannot be killed.", health.unkillable)
    yield node_value("sample_timestamp_seconds", "When the driver last answered.", health.sampled)
    yield node_family(
        "collector_success",
        "Whether a part of the last sample could be read.",
        "collector",
        {name: not fault for name, fault in sorted(health.collectors.items())},
    )
    yield node_family(
        "exporter_build_info", "Version of the exporter.", "version", {health.version: 1}
    )
