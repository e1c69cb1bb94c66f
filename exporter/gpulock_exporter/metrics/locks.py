# SPDX-License-Identifier: Apache-2.0
"""Who holds each device, and what is wrong with it: from the lock directory, NVML or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpulock.alloc import states
from gpulock_exporter.metrics.families import Metric, labels
from gpulock_exporter.metrics.labels import Labelled, LabelUser, gauges
from gpulock_exporter.state.snapshot import Seen

INFO = gauges("lock_info", "Which job holds the {device}; 1 while it does.")
LOCKED = gauges("locked", "Whether the {device} is locked.")
ACQUIRED = gauges("lock_acquired_timestamp_seconds", "When the lock of the {device} was taken.")
STALE = gauges(
    "lock_stale", "Whether the owner of the {device} is proven dead, by the last reconcile."
)
LAST_BUSY = gauges(
    "last_busy_timestamp_seconds", "When the {device} was last observed at work in this boot."
)
FOREIGN = gauges(
    "foreign_processes",
    "Processes on the {device} that are neither its owner's nor a service; "
    "absent where some cannot be seen.",
)
QUARANTINED = gauges("quarantined", "Whether the {device} is out of service.")
MISSING = gauges("missing", "Whether the {device} is expected but not there.")


def collect(found: Sequence[Labelled], label_user: LabelUser) -> list[Metric]:
    """Return the families of locks."""
    return [
        *INFO.all(found, lambda seen: info(seen, label_user)),
        *LOCKED.metrics(found, lambda seen: None if seen.state is None else int(bool(seen.lock))),
        *ACQUIRED.metrics(found, acquired),
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


def info(seen: Seen, label_user: LabelUser) -> Iterator[tuple[str, float]]:
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


def acquired(seen: Seen) -> float | None:
    """Return when a lock was taken, None where its record does not tell."""
    record = seen.owner
    return record.claimed_at if record and record.claimed_at > 0 else None
