# SPDX-License-Identifier: Apache-2.0
"""Who holds each device, and what is wrong with it: from the lock directory, NVML or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpulock.alloc import states
from gpulock_exporter.metrics.families import Metric, labels
from gpulock_exporter.metrics.labels import LabelledDevice, LabelUser, gauge_pair
from gpulock_exporter.state.snapshot import DeviceSnapshot

INFO = gauge_pair("lock_info", "Which job holds the {device}; 1 while it does.")
LOCKED = gauge_pair("locked", "Whether the {device} is locked.")
ACQUIRED = gauge_pair("lock_acquired_timestamp_seconds", "When the lock of the {device} was taken.")
STALE = gauge_pair(
    "lock_stale", "Whether the owner of the {device} is proven dead, by the last reconcile."
)
LAST_BUSY = gauge_pair(
    "last_busy_timestamp_seconds", "When the {device} was last observed at work in this boot."
)
FOREIGN = gauge_pair(
    "foreign_processes",
    "Processes on the {device} that are neither its owner's nor a service; "
    "absent where some cannot be seen.",
)
QUARANTINED = gauge_pair("quarantined", "Whether the {device} is out of service.")
MISSING = gauge_pair("missing", "Whether the {device} is expected but not there.")


def collect_lock_families(found: Sequence[LabelledDevice], label_user: LabelUser) -> list[Metric]:
    """Return the families of locks."""
    return [
        *INFO.all(found, lambda seen: lock_info_labels(seen, label_user)),
        *LOCKED.metrics(found, lambda seen: None if seen.state is None else int(bool(seen.lock))),
        *ACQUIRED.metrics(found, lock_acquired_time),
        *STALE.metrics(found, lambda seen: None if seen.stale is None else int(seen.stale)),
        *LAST_BUSY.metrics(found, lambda seen: seen.last_busy),
        *FOREIGN.metrics(found, lambda seen: seen.foreign),
        *QUARANTINED.metrics(
            found, lambda seen: None if seen.quarantined is None else int(seen.quarantined)
        ),
        *MISSING.metrics(
            found, lambda seen: None if seen.state is None else int(seen.state == states.MISSING)
        ),
    ]


def lock_info_labels(seen: DeviceSnapshot, label_user: LabelUser) -> Iterator[tuple[str, float]]:
    """Yield who holds a device; the record's comment and paths stay where they are."""
    record = seen.owner
    if record is not None:
        pairs = [
            ("scheduler", record.scheduler),
            ("job_id", record.job_id),
            ("task_id", record.task_id),
            ("user", label_user.of(record)),
            ("queue", record.queue),
        ]
        yield labels(pairs), 1


def lock_acquired_time(seen: DeviceSnapshot) -> float | None:
    """Return when a lock was taken, None where its record does not tell."""
    record = seen.owner
    return record.claimed_at if record and record.claimed_at > 0 else None
