# SPDX-License-Identifier: Apache-2.0
"""Read the history: filters and sums by the head of each line, JSON only for what is shown.

A line that is no record costs itself, and is counted.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from gpulock.daemon.history.files import (
    CHUNK,
    iter_history_lines,
    list_months,
)
from gpulock.daemon.history.record import (
    HEAD,
    HEAD_VALUES,
    REAL_OR_NULL,
    TEXT,
)
from gpulock.report.claims import GpuTimes, ReportedClaim, parse_reported_claim
from gpulock.store.owner import Owner
from gpulock.text.words import format_count

FOREVER: Final = float("inf")
TAIL: Final = 1 << 16  # bytes from the end of a file that are read first
WIDER: Final = 8  # times as much is read next
NO_JOBS: Final = ("process", "admin")  # whose numbers are no jobs'
NULL: Final = b"null"
FIRST_TASK: Final = (b'"1"', b'""')  # 12.1 may be no array
SUMMED: Final = ("held_seconds", "busy_seconds", "observed_seconds")
DEVICE: Final = re.compile(
    rb'\{"id":(%b),' % TEXT
    + b",".join([b'"%b":(%b)' % (key.encode(), REAL_OR_NULL) for key in SUMMED])
    + b","
)

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
        """Return what the line of every claim that fits has in it, and of no other.

        In a JSON string each quote has a backslash before it, so none of these is in a text.
        """
        pairs = (
            ('"job_id":', self.job),
            ('"user":', self.user),
            ('{"id":', self.device),
            ('"task_id":', "" if self.task == "1" else self.task),  # see fits_head
            ('"scheduler":', self.scheduler),
        )
        return [f"{key}{json.dumps(value)}".encode() for key, value in pairs if value]

    def fits_head(self, head: Head) -> bool:
        """Return whether a line that has the needles is asked for; raise ValueError."""
        if self.job and not self.scheduler and json.loads(head["scheduler"]) in NO_JOBS:
            return False
        if self.task == "1" and head["task_id"] not in FIRST_TASK:
            return False
        return self.since <= float(head["released_at"]) < self.until


class HistoryFaults:
    """What could not be read: lines by number, files with their reason."""

    def __init__(self) -> None:
        self.lines = 0
        self.files: list[str] = []

    def as_sentences(self) -> list[str]:
        """Return it as sentences."""
        lines = f"{format_count(self.lines, 'line')} of the history cannot be read"
        return [*[lines][: self.lines], *self.files]


def find_history_heads(folder: str, query: ClaimQuery, faults: HistoryFaults) -> Iterator[Head]:
    """Yield the head of each line that is asked for, the oldest first."""
    for path in history_paths(folder, query, faults):
        yield from match_lines(path, 0, query, faults)


def find_latest_heads(
    folder: str, query: ClaimQuery, limit: int, faults: HistoryFaults
) -> list[Head]:
    """Return the heads of the last lines that are asked for, the latest last; `limit` 0: all.

    Files are read from their end on, and no further than it takes.
    """
    found: list[Head] = []
    for path in reversed(history_paths(folder, query, faults)):
        span, most = TAIL, limit - len(found) if limit else None
        while True:
            own = HistoryFaults()
            size = 0
            with suppress(OSError):  # match_lines tells
                size = os.stat(path).st_size
            begin = max(0, size - span) if limit else 0
            heads = deque(match_lines(path, begin, query, own), most)
            if begin == 0 or len(heads) == most:
                break
            span *= WIDER
        faults.lines += own.lines
        faults.files += own.files
        found[:0] = heads
        if limit and len(found) >= limit:
            break
    return found


def history_paths(folder: str, query: ClaimQuery, faults: HistoryFaults) -> list[str]:
    """Return the files that may have what is asked for, the oldest first."""
    try:
        return [f"{folder}/{name}" for name in list_months(folder, query.since)]
    except OSError as fault:
        faults.files.append(f"{folder}: {fault.strerror}")
        return []


def match_lines(path: str, begin: int, query: ClaimQuery, faults: HistoryFaults) -> Iterator[Head]:
    """Yield the heads of what is asked for among the lines of a file behind `begin`."""
    needles = query.needles()
    try:
        with open(path, "rb", buffering=CHUNK) as file:
            for line in iter_history_lines(file, begin):
                if head := match_line(line, query, needles, faults):
                    yield head
    except FileNotFoundError:
        return  # it was removed meanwhile
    except OSError as fault:
        faults.files.append(f"{path}: {fault.strerror}")


def match_line(
    line: bytes, query: ClaimQuery, needles: Sequence[bytes], faults: HistoryFaults
) -> Head | None:
    """Return the head of a line that is asked for, else None; count what is no record.

    With zeros in it a power cut tore it, and its claim has another line.
    """
    for needle in needles:
        if needle not in line:
            return None
    head = HEAD.match(line) if b"\0" not in line else None
    try:
        if head is not None:
            return head if query.fits_head(head) else None
    except ValueError:
        pass  # its time is none
    faults.lines += 1
    return None


def parse_history_line(line: bytes, faults: HistoryFaults) -> ReportedClaim | None:
    """Return the claim of a line; count what is none."""
    try:
        return parse_reported_claim(json.loads(line))
    except (ValueError, RecursionError):
        faults.lines += 1
        return None


def sum_claims(heads: Iterable[Head], by: str = "", device: str = "") -> dict[str, GpuTimes]:
    """Return the sums by user, queue or device, or of everything under an empty name.

    Of a `device` that was asked for, only its own time counts, not its neighbours'.
    """
    found: defaultdict[bytes, GpuTimes] = defaultdict(GpuTimes)
    key, own = by if by in HEAD_VALUES else "", json.dumps(device).encode()
    for head in heads:
        name = head[key] if key else b'""'
        if by != "device" and not device:
            add_times(found[name], *head.group("gpu_seconds", "busy_seconds", "observed_seconds"))
            continue
        end = head.string.find(b',"shapes":')
        for one, *times in DEVICE.findall(head.string, head.end(), end):
            if not device or one == own:
                add_times(found[one if by == "device" else name], *times)
    return {json.loads(name): one for name, one in found.items()}


def add_times(times: GpuTimes, held: bytes, busy: bytes, observed: bytes) -> None:
    """Add what stands in a line; what is not known adds nothing."""
    times.claims += 1
    if held != NULL:
        known = None if NULL in (busy, observed) else float(busy)
        times.add(float(held), known, 0.0 if observed == NULL else float(observed))
