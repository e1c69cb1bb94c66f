# SPDX-License-Identifier: Apache-2.0
"""The history as JSON and CSV, for programs; there may be a million claims."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from io import StringIO
from itertools import chain

import click

from gpulock.report.claims import ReportedClaim

VERSION = 1
CHUNK = 1 << 16  # characters that are written at once
FIELDS = (
    *("released_at", "claimed_at", "node", "scheduler", "job_id", "task_id", "user", "uid"),
    *("queue", "gpus", "held_seconds", "gpu_seconds", "busy_seconds", "observed_seconds"),
    *("utilization", "energy_joules", "memory_peak_bytes", "last_busy", "foreign_seconds"),
    *("how", "proof", "token"),
)


def claims_to_json(found: Iterable[ReportedClaim]) -> Iterator[str]:
    """Yield the records as text."""
    yield f'{{"version": {VERSION}, "claims": ['
    comma = "\n"
    for claim in found:
        yield comma + json.dumps(claim.record)
        comma = ",\n"
    yield "\n]}\n"


def claims_to_csv(found: Iterable[ReportedClaim]) -> Iterator[str]:
    """Yield a line a claim, without its devices."""
    return rows_to_csv(
        chain([FIELDS], ([claim.record.get(key) for key in FIELDS] for claim in found))
    )


def rows_to_csv(rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield rows as CSV."""
    line = StringIO()
    writer = csv.writer(line, lineterminator="\n")
    for row in rows:
        writer.writerow(row)
        yield line.getvalue()
        line.seek(0)
        line.truncate()


def echo_in_chunks(pieces: Iterable[str]) -> None:
    """Print a text of many pieces; all of it by echo, so that it is known what a fault is of."""
    some: list[str] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece)
        if size >= CHUNK:
            click.echo("".join(some), nl=False)
            some, size = [], 0
    click.echo("".join(some), nl=False)
