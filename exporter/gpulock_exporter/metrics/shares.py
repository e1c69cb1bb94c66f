# SPDX-License-Identifier: Apache-2.0
"""The families of a shared GPU: whose its shares are, which part of it each is, and what it does.

A claim of several places has what its processes do on the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from gpulock.node.devices import SHARE
from gpulock_exporter.metrics.labels import Labels, LabelUser, known_labels, owner_labels
from gpulock_exporter.state.snapshot import DeviceSnapshot

Samples = Callable[[DeviceSnapshot], Iterable[tuple[Labels, float]]]


def share_families(label_user: LabelUser) -> tuple[tuple[str, str, Samples], ...]:
    """Return name, meaning and samples of each family."""
    return (
        (
            "share_info",
            "Which jobs share the GPU, each by its own lock; 1 while they do.",
            lambda seen: share_info_labels(seen, label_user),
        ),
        (
            "share_ratio",
            "Which part of the GPU a share is, by the places that its card had at the claim.",
            share_parts,
        ),
        (
            "share_places",
            "How many shares the GPU gives out, by SHARES.",
            lambda seen: () if seen.places is None else [({}, float(seen.places))],
        ),
        (
            "share_memory_used_bytes",
            "Memory in use by the processes of a share of the GPU.",
            lambda seen: share_values(seen.share_memory),
        ),
        (
            "share_utilization_ratio",
            "Share of time in which the processes of a share of the GPU worked, at the last "
            "sample.",
            lambda seen: share_values(seen.share_use),
        ),
    )


def share_info_labels(
    seen: DeviceSnapshot, label_user: LabelUser
) -> Iterator[tuple[Labels, float]]:
    """Yield who has a share of a device: a family of its own, since joins need one series each."""
    for name, record in seen.sharers.items():
        yield known_labels([*owner_labels(record, label_user), ("share", share_number(name))]), 1


def share_parts(seen: DeviceSnapshot) -> Iterator[tuple[Labels, float]]:
    """Yield which part of its card each share is; nobody knows that of one that Slurm counts."""
    for name, record in seen.sharers.items():
        if record.places > 0:
            yield {"share": share_number(name)}, 1 / record.places


def share_values(values: Mapping[str, float]) -> Iterator[tuple[Labels, float]]:
    """Yield a value of each share, by the number of its place."""
    for name, value in values.items():
        yield {"share": share_number(name)}, value


def share_number(name: str) -> str:
    """Return the number of a place, of its lock id."""
    return name.partition(SHARE)[2]
