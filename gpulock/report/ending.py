# SPDX-License-Identifier: Apache-2.0
"""The report at a job's end, made as the job's user: printed, or added to its output.

The epilog has released the claim a moment ago: the exporter may have yet to close its account,
and the history may have taken it already. So we look for a while, and say what is known then.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpulock.daemon.history.record import ExporterSamples
from gpulock.deadline import Deadline
from gpulock.node.context import Node
from gpulock.report.claims import ReportedClaim, parse_reported_claim
from gpulock.report.scan import ClaimQuery, HistoryFaults, find_history_claims
from gpulock.report.sources import node_history_folder, read_local_records

SECONDS: Final = 6.0  # the exporter closes an account within two, or five
POLL_SECONDS: Final = 0.1
RECENT: Final = 600.0  # seconds since which the history may have taken it


def gather_ended_claims(
    node: Node, tokens: Sequence[str], deadline: Deadline, pause: Callable[[float], None]
) -> list[ReportedClaim]:
    """Return the claims once the exporter has had its last word, or at the deadline."""
    while True:
        records = read_local_records(node, lambda owner: owner.token in tokens)
        advice = ExporterSamples(node.settings.exporter_dir)
        if deadline.left() <= 0 or not any(
            is_account_open(node, advice, record) for record in records
        ):
            break
        pause(POLL_SECONDS)
    found = {str(record["token"]): parse_reported_claim(record) for record in records}
    for token in tokens:
        if token not in found:
            query = ClaimQuery(since=time.time() - RECENT, token=token)
            found |= {
                claim.token: claim
                for claim in find_history_claims(node_history_folder(node), query, HistoryFaults())
            }
    return sorted(found.values(), key=lambda claim: claim.begun)


def is_account_open(node: Node, advice: ExporterSamples, record: dict[str, Any]) -> bool:
    """Return whether the exporter has yet to close the account of a released claim."""
    released = record["released_at"]
    return released is not None and advice.may_come(
        str(record["token"]), node.boot_id, float(released), time.time()
    )


def append_report(path: str, text: str) -> None:
    """Add to the job's output file as the user; raise OSError unless the file is the user's."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags)
    try:
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
            os.write(fd, text.encode("utf-8", "replace"))
    finally:
        os.close(fd)
