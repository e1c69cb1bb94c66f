# SPDX-License-Identifier: Apache-2.0
"""A claim as reports see it, read from a record of the history or of REPORT_DIR; pure.

A record may come from a file that anybody wrote: a value that is not of its type or cannot be
is not known, and no text keeps a control character.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from gpulock.daemon.history.record import VERSION
from gpulock.errors import one_line
from gpulock.node.sample import BUCKETS

MOST_CARDS: Final = 256  # devices of one claim
MOST: Final = 1e15  # of any number: beyond, it is garbage
LONGEST: Final = 256  # characters of a text
MILLI: Final = 1000


@dataclass(frozen=True)
class Shape:
    """Use over time: the share at work in each bucket of `width` seconds, None: not observed."""

    width: float
    use: tuple[float | None, ...]


@dataclass(frozen=True)
class Card:
    """One device of a claim; seconds, joules, bytes, epoch. None is not known."""

    id: str
    held: float
    busy: float | None
    observed: float
    index: int | None = None
    minor: int | None = None
    uuid: str = ""
    model: str = ""
    profile: str = ""
    memory: int | None = None
    memory_peak: int | None = None
    energy: float | None = None
    last_busy: float | None = None
    foreign: float | None = None
    shape: Shape | None = None
    timed: bool = True  # False: for how long it was held is not known, and `held` is 0

    @property
    def utilization(self) -> float | None:
        """Return the share of the observed time at work, None where nothing was observed."""
        return self.busy / self.observed if self.busy is not None and self.observed > 0 else None

    @property
    def idle(self) -> float:
        """Return the observed seconds in which it did nothing."""
        return max(0.0, self.observed - self.busy) if self.busy is not None else 0.0

    @property
    def unobserved(self) -> float:
        """Return the seconds of which nothing is known."""
        return max(0.0, self.held - self.observed) if self.busy is not None else self.held

    @property
    def name(self) -> str:
        """Return what names it on its node: index, and the instance."""
        instance = self.id.partition(".gi")[2]
        if self.index is None:
            return self.id
        return f"{self.index}:gi{instance}" if instance else str(self.index)


@dataclass(frozen=True)
class Claim:
    """All devices that one job held on one node; `ended` is None while it stands."""

    token: str
    scheduler: str
    node: str
    job_id: str
    task_id: str
    user: str
    uid: int
    begun: float
    ended: float | None
    cards: tuple[Card, ...]
    cluster: str = ""
    queue: str = ""
    restart: int = 0
    how: str = ""
    proof: str = ""
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def held(self) -> float:
        """Return for how many seconds its longest device was held."""
        return max([card.held for card in self.cards], default=0.0)

    @property
    def timed(self) -> bool:
        """Return whether it is known for how long anything was held."""
        return any(card.timed for card in self.cards)

    @property
    def job(self) -> str:
        """Return how people name the job."""
        if self.scheduler == "process":
            return f"pid {self.job_id}"
        if self.scheduler == "admin":
            return "reserve"
        return self.job_id if self.task_id in ("", "1") else f"{self.job_id}.{self.task_id}"


def claim_of(record: object) -> Claim:
    """Return the claim that a record tells of; raise ValueError where it tells of none."""
    fields = mapping(record)
    if fields.get("version") != VERSION:
        raise ValueError(f"a record of version {str(fields.get('version'))[:20]}")
    token, begun = text(fields, "token"), number(fields, "claimed_at")
    if not token or begun is None or not text(fields, "job_id"):
        raise ValueError("a record without token, job or time")
    shapes = mapping(fields.get("shapes", {}))
    cards = [card_of(one, shapes) for one in sequence(fields.get("devices"))[:MOST_CARDS]]
    return Claim(
        token=token,
        scheduler=text(fields, "scheduler"),
        cluster=text(fields, "cluster"),
        node=text(fields, "node"),
        job_id=text(fields, "job_id"),
        task_id=text(fields, "task_id"),
        restart=count(fields, "restart") or 0,
        user=text(fields, "user"),
        uid=count(fields, "uid") or 0,
        queue=text(fields, "queue"),
        begun=begun,
        ended=number(fields, "released_at"),
        how=text(fields, "how"),
        proof=text(fields, "proof"),
        cards=tuple(cards),
        record=fields,
    )


def card_of(record: object, shapes: Mapping[str, Any]) -> Card:
    """Return one device of a record; raise ValueError."""
    fields = mapping(record)
    name = text(fields, "id")
    if not name:
        raise ValueError("a device without id")
    held = number(fields, "held_seconds") or 0.0
    observed = min(number(fields, "observed_seconds") or 0.0, held)
    busy = number(fields, "busy_seconds")
    return Card(
        id=name,
        held=held,
        busy=min(busy, observed) if busy is not None and observed > 0 else None,
        observed=observed,
        index=count(fields, "index"),
        minor=count(fields, "minor"),
        uuid=text(fields, "uuid"),
        model=text(fields, "model"),
        profile=text(fields, "profile"),
        memory=count(fields, "memory_bytes"),
        memory_peak=count(fields, "memory_peak_bytes"),
        energy=number(fields, "energy_joules"),
        last_busy=number(fields, "last_busy"),
        foreign=number(fields, "foreign_seconds"),
        shape=shape_of(shapes.get(name)),
        timed=number(fields, "held_seconds") is not None,
    )


def shape_of(record: object) -> Shape | None:
    """Return use over time, None where it makes no sense."""
    if not isinstance(record, dict):
        return None
    fields = mapping(cast(object, record))
    width = number(fields, "width")
    if width is None or width < 1:
        return None
    use = [known(value) for value in sequence(fields.get("use"))[:BUCKETS]]
    return Shape(width, tuple([None if one is None else min(1.0, one / MILLI) for one in use]))


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object; raise ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return cast("Mapping[str, Any]", value)


def sequence(value: object) -> Sequence[object]:
    """Return a JSON array, or nothing."""
    if isinstance(value, (list, tuple)):
        return cast("Sequence[object]", value)
    return ()


def known(value: object) -> float | None:
    """Return a number from 0, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= MOST and math.isfinite(value) else None


def number(fields: Mapping[str, Any], key: str) -> float | None:
    """Return a number from 0 of a record."""
    return known(fields.get(key))


def count(fields: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number from 0 of a record."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MOST else None


def text(fields: Mapping[str, Any], key: str) -> str:
    """Return a text of a record as it may be shown."""
    value = fields.get(key)
    return one_line(value[:LONGEST]) if isinstance(value, str) else ""
