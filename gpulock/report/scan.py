# SPDX-License-Identifier: Apache-2.0
"""Read the history: filters and sums by the head of each line, JSON only for what is shown.

A line that is no record costs itself, and is counted.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from gpulock.daemon.history.files import CHUNK, FOLDER, iter_history_lines, list_months
from gpulock.daemon.history.record import HEAD
from gpulock.node.context import Node
from gpulock.report.claims import GpuTimes, ReportedClaim, parse_reported_claim
from gpulock.store.owner import Owner
from gpulock.text.words import format_count

FOREVER: Final = float("inf")
TAIL: Final = 1 << 20  # bytes from the end of a file that are read first
NO_JOBS: Final = ("process", "admin")  # whose numbers are no jobs'
TIMES: Final = ("gpu_seconds", "busy_seconds", "observed_seconds")
FILTERED: Final = ("user", "job_id", "task_id", "scheduler")  # keys of a head

Head = re.Match[bytes]


class ClaimQuery(NamedTuple):
    """Which claims: those that ended `since` and before `until` (epoch), and all of the rest."""

    since: float = 0.0
    until: float = FOREVER
    user: str = ""
    job: str = ""
    task: str = ""
    scheduler: str = ""
    device: str = ""

    def fits(self, claim: Owner) -> bool:
        """Return whether a claim is of the user, job and scheduler that are asked for.

        A job's number is no process's. The first task may be the job itself, which is no array.
        """
        return (
            self.user in ("", claim.user)
            and self.job in ("", claim.job_id)
            and self.task in ("", claim.task_id or "1")
            and (self.scheduler or claim.scheduler) == claim.scheduler
            and (not self.job or bool(self.scheduler) or claim.scheduler not in NO_JOBS)
        )

    def needles(self) -> list[bytes]:
        """Return what is in the line of each claim that fits: others need no further look.

        In a JSON string each quote has a backslash before it, so the device's is in no text.
        """
        named = (("", self.user), ("", self.job), ('{"id":', self.device))
        return [f"{key}{json.dumps(value)}".encode() for key, value in named if value]

    def fits_head(self, head: Head) -> bool:
        """Return whether a line that has the needles is asked for; raise ValueError."""
        if not self.since <= float(head["released_at"]) < self.until:
            return False
        if not (self.user or self.job or self.scheduler):
            return True
        return self.fits(Owner(**{key: json.loads(head[key]) for key in FILTERED}))


class HistoryFaults:
    """What could not be read: lines by number, files with their reason."""

    def __init__(self) -> None:
        self.lines = 0
        self.files: list[str] = []

    def as_sentences(self) -> list[str]:
        """Return it as sentences."""
        lines = f"{format_count(self.lines, 'line')} of the history cannot be read"
        return [*[lines][: self.lines], *self.files]


def find_history_heads(
    node: Node, query: ClaimQuery, faults: HistoryFaults, limit: int = 0
) -> Iterable[Head]:
    """Return the heads of the lines that are asked for, in their order; of a `limit` the last.

    For those files are read from their end on, and no further than it takes.
    """
    folder = f"{node.settings.state_dir}/{FOLDER}"
    try:
        paths = [f"{folder}/{name}" for name in list_months(folder, query.since)]
    except OSError as fault:
        faults.files.append(f"{folder}: {fault.strerror}")
        return []
    if not limit:
        return (head for path in paths for head in match_lines(path, 0, query, faults))
    latest: list[Head] = []
    while paths and len(latest) < limit:
        path, size = paths.pop(), 0
        with suppress(OSError):  # match_lines tells
            size = os.stat(path).st_size
        for begin in (max(0, size - TAIL), 0):
            own = HistoryFaults()
            heads = deque(match_lines(path, begin, query, own), limit - len(latest))
            if begin == 0 or len(heads) == heads.maxlen:
                break
        faults.lines += own.lines
        faults.files += own.files
        latest[:0] = heads
    return latest


def match_lines(path: str, begin: int, query: ClaimQuery, faults: HistoryFaults) -> Iterator[Head]:
    """Yield the heads of what is asked for among the lines of a file behind `begin`.

    A line with zeros in it a power cut tore, and its claim has another line.
    """
    needles = query.needles()
    try:
        with open(path, "rb", buffering=CHUNK) as file:
            for line in iter_history_lines(file, begin):
                if not all(needle in line for needle in needles):
                    continue
                head = HEAD.match(line) if b"\0" not in line else None
                try:
                    if head is None:
                        faults.lines += 1
                    elif query.fits_head(head):
                        yield head
                except ValueError:  # its time is none
                    faults.lines += 1
    except FileNotFoundError:
        return  # it was removed meanwhile
    except OSError as fault:
        faults.files.append(f"{path}: {fault.strerror}")


def parse_history_line(line: bytes, faults: HistoryFaults) -> ReportedClaim | None:
    """Return the claim of a line; count what is none."""
    try:
        return parse_reported_claim(json.loads(line))
    except (ValueError, RecursionError):
        faults.lines += 1
        return None


def parse_heads(heads: Iterable[Head], faults: HistoryFaults) -> Iterator[ReportedClaim]:
    """Yield the claims of these lines."""
    for head in heads:
        if claim := parse_history_line(head.string, faults):
            yield claim


def sum_claims(
    heads: Iterable[Head], faults: HistoryFaults, by: str = "", device: str = ""
) -> dict[str, GpuTimes]:
    """Return the sums by user, queue or device, or of everything under an empty name.

    Of a `device` that was asked for, only its own time counts, not its neighbours'.
    """
    sums: defaultdict[bytes, GpuTimes] = defaultdict(GpuTimes)
    for head in heads:
        name = head[by] if by in ("user", "queue") else b'""'
        if by != "device" and not device:
            sums[name].claims += 1
            sums[name].add(*[None if one == b"null" else float(one) for one in head.group(*TIMES)])
        elif claim := parse_history_line(head.string, faults):
            cards = [card for card in claim.cards if device in ("", card.id)]
            keys = [json.dumps(c.id).encode() if by == "device" else name for c in cards]
            for key, card in zip(keys, cards):
                sums[key].add(card.times.held, card.times.busy, card.times.observed)
            for key in {*keys}:
                sums[key].claims += 1
    return {json.loads(name): one for name, one in sums.items()}
