# SPDX-License-Identifier: Apache-2.0
"""The families of metrics, each made from a snapshot; pure. The order is that of the text."""

from __future__ import annotations

from gpulock_exporter.metrics import devices, health, identity, locks, node
from gpulock_exporter.metrics.families import Metric
from gpulock_exporter.metrics.labels import LabelUser, labelled
from gpulock_exporter.state.snapshot import Snapshot


def collect(snapshot: Snapshot, label_user: LabelUser = LabelUser.NAME) -> list[Metric]:
    """Return all families that have a value; `label_user` says how people are told apart."""
    seen = labelled(snapshot.devices)
    return [
        *identity.collect(seen, snapshot.driver),
        *locks.collect(seen, label_user),
        *devices.collect(seen),
        *node.collect(snapshot),
        *health.collect(snapshot.health),
    ]
