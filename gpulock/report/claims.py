# SPDX-License-Identifier: Apache-2.0
"""A claim as reports see it, read from a record of the history; pure.

Root wrote the record, of values that it believed (`daemon.history.record`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gpulock.daemon.history.record import VERSION
from gpulock.store.owner import Owner
from gpulock.text.words import format_percent

Fields = dict[str, Any]  # of a JSON object
# of its owner
WORDS = ("token", "scheduler", "cluster", "node", "job_id", "task_id", "user", "queue")


class GpuTimes:
    """GPU seconds held, at work and observed, of one device or of some `claims`."""

    def __init__(self) -> None:
        self.held = self.busy = self.observed = 0.0
        self.claims = 0

    def add(self, held: float | None, busy: float | None, observed: float | None) -> None:
        """Add the times of a record; of what `busy` is not known nothing was observed."""
        self.held += held or 0.0
        if busy is not None:
            observed = min(observed or 0.0, held or 0.0)
            self.observed += observed
            self.busy += min(busy, observed)

    @property
    def utilization(self) -> float | None:
        """Return the share of the observed time at work, None where nothing was observed."""
        return self.busy / self.observed if self.observed > 0 else None

    @property
    def parts(self) -> tuple[float, float, float]:
        """Return the seconds at work, those in which nothing was done, and those not observed."""
        return self.busy, self.observed - self.busy, self.held - self.observed

    def shares(self) -> tuple[str, str, str]:
        """Return how much of the time was at work, idle, and not observed."""
        held = self.held
        busy, idle, unseen = [format_percent(n / held if held > 0 else None) for n in self.parts]
        return (busy, idle, unseen) if self.observed > 0 else ("-", "-", unseen)


class ReportedDevice(NamedTuple):
    """One device of a claim, or a place on one; the rest of its `record` as in the history.

    Of a place the times are those of such a part of its card. `shape` is the use in thousandths
    in each bucket of so many seconds, None in it: not observed.
    """

    id: str
    times: GpuTimes
    record: Fields
    shape: Fields | None

    @property
    def name(self) -> str:
        """Return what names it on its node: index, and the instance or the part of the card."""
        index, instance = self.record.get("index"), self.id.partition(".gi")[2]
        part = f" (1/{self.record.get('places') or '?'})" if self.record.get("share") else ""
        if index is None:
            return f"{self.id}{part}"
        return f"{index}:gi{instance}" if instance else f"{index}{part}"


class ReportedClaim(NamedTuple):
    """All devices that one job held on one node; `ended` is None while it stands.

    `owner` has what names the job to people. It was `held` for so many seconds, None: not known.
    """

    owner: Owner
    begun: float
    ended: float | None
    held: float | None
    how: str
    proof: str
    cards: tuple[ReportedDevice, ...]
    record: Fields


def parse_reported_claim(record: Fields) -> ReportedClaim:
    """Return the claim that a record of the history tells of; raise ValueError for no such one."""
    try:
        if record["version"] != VERSION:
            raise ValueError(f"a record of version {record['version']!s:.20}")
        shapes, ended = record["shapes"], record["released_at"]
        words = {key: str(record.get(key) or "") for key in WORDS}
        owner = Owner(**words, uid=record["uid"], restart=int(record.get("restart") or 0))
        return ReportedClaim(
            owner,
            begun=float(record["claimed_at"]),
            ended=None if ended is None else float(ended),
            held=record["held_seconds"],
            how=record.get("how") or "",
            proof=record.get("proof") or "",
            cards=tuple(
                ReportedDevice(one["id"], read_device_times(one), one, shapes.get(one["id"]))
                for one in record["devices"]
            ),
            record=record,
        )
    except (LookupError, TypeError, AttributeError, ArithmeticError) as fault:
        raise ValueError("no record of a claim") from fault


def read_device_times(record: Fields) -> GpuTimes:
    """Return the times of one device of a record."""
    times = GpuTimes()
    times.add(*[record.get(f"{key}_seconds") for key in ("held", "busy", "observed")])
    return times


def sum_times(cards: Iterable[ReportedDevice]) -> GpuTimes:
    """Return the times of some devices together."""
    total = GpuTimes()
    for card in cards:
        total.add(card.times.held, card.times.busy, card.times.observed)
    return total
