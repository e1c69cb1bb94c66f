# SPDX-License-Identifier: Apache-2.0
"""The families of metrics, each made from a snapshot; pure. The order is that of the text."""

from __future__ import annotations

from gpulock_exporter.metrics import devices, health, identity, locks, node
from gpulock_exporter.metrics.families import Metric
from gpulock_exporter.metrics.labels import LabelUser, label_devices
from gpulock_exporter.state.snapshot import NodeSnapshot


def collect_families(
    snapshot: NodeSnapshot, label_user: LabelUser = LabelUser.NAME
) -> list[Metric]:
    """Return all families that have a value; `label_user` says how people are told apart."""
    seen = label_devices(snapshot.devices)
    return [
        *identity.collect_identity_families(seen, snapshot.driver),
        *locks.collect_lock_families(seen, label_user),
        *devices.collect_device_families(seen),
        *node.collect_node_families(snapshot),
        *health.collect_health_families(snapshot.health),
    ]
