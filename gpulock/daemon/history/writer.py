# SPDX-License-Identifier: Apache-2.0
"""The one author of the history, after each reconcile: gpulockd, or `gpulock reap` without it.

Warm. A line is made durable before the finished claim goes, and one whose author may have been
another or was killed is looked for in the history first. So a crash at any instruction loses no
claim and writes none twice; a claim that cannot be written waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Final

from gpulock.alloc.reaper import FREED
from gpulock.daemon.history import pending
from gpulock.daemon.history.files import (
    FOLDER,
    append_history_lines,
    expired_months,
    find_written_tokens,
    list_months,
    name_month,
)
from gpulock.daemon.history.pending import EndedClaims
from gpulock.daemon.history.record import (
    ExporterSamples,
    build_history_record,
    encode_history_record,
)
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import grants
from gpulock.store.event_log import count_dropped_claims
from gpulock.store.gate import Gate

LOCK_SECONDS: Final = 5.0  # for another author to finish


class HistoryWriter(Chore):
    """The chore; `say` is told each fault once while it lasts."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._written: set[str] = set()  # claims that have their line, and cannot be removed
        self._sizes: dict[str, int] = {}  # of the files as this process left them

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Write what is over; `now` is CLOCK_BOOTTIME in seconds."""
        faults: set[str] = set()
        left = [one.lock.owner for one in report.outcomes if one.act != FREED]
        standing = {record.token: record for record in left if record}
        here = [one for one in standing.values() if one.boot_id == node.boot_id]
        pending.touch_last_seen(node.settings.state_dir, here, clock_boottime())
        try:
            if ended := pending.find_ended_claims(node, standing, faults, time.time()):
                devices = {device.id: device for device in report.devices}
                self._write(node, ended, devices, faults)
        except (OSError, Refusal) as failed:
            why = failed.why if isinstance(failed, Refusal) else str(failed)
            faults.add(f"the history of finished claims waits in {node.store.finished_dir}: {why}")
        if dropped := count_dropped_claims(node.store.path):
            cap = grants.FINISHED_CAP
            faults.add(
                f"the history lacks {dropped} claims of this boot: "
                f"more than {cap} finished ones waited for it"
            )
        for fault in sorted(faults - self._said):
            self._say(fault)
        self._said = faults

    def _write(
        self, node: Node, ended: EndedClaims, devices: Mapping[str, Device], faults: set[str]
    ) -> None:
        """Write the claims that need wait for nothing more; raise OSError or Refusal."""
        samples, now = ExporterSamples(node.settings.exporter_dir), time.time()
        ends = {token: max(parts, key=lambda part: part.at) for token, parts in ended.items()}
        ready = {
            token: ended[token]
            for token, last in sorted(ends.items(), key=lambda item: (item[1].at, item[0]))
            if not samples.may_come(token, last.owner.boot_id, last.at, now)
        }
        if not ready:
            return
        folder = f"{node.settings.state_dir}/{FOLDER}"
        os.makedirs(folder, 0o755, exist_ok=True)  # a site may set its mode, or have a link there
        with Gate(folder, Deadline(LOCK_SECONDS)):
            done = self._find_written(folder, ready)
            lines: dict[str, bytes] = {}
            for token in [one for one in ready if one not in done]:
                try:
                    claim = build_history_record(ready[token], samples, devices)
                    lines[token] = encode_history_record(claim)
                except (ValueError, OverflowError) as fault:
                    faults.add(f"claim {token} has no line: {fault}; remove it from finished")
            if lines:
                append_history_lines(f"{folder}/{name_month(now)}", b"".join(lines.values()))
            done |= lines.keys()
            pending.remove_written_claims(node, done)
            for name in expired_months(list_months(folder), node.settings.history_days, now):
                os.unlink(f"{folder}/{name}")
            self._written, self._sizes = done, file_sizes(folder)

    def _find_written(self, folder: str, ready: EndedClaims) -> set[str]:
        """Return the claims whose line is there already.

        One that says how it was released is looked for only where another author has written.
        """
        done = self._written & ready.keys()
        other = file_sizes(folder) != self._sizes
        sought = {
            token
            for token in ready.keys() - done
            if other or not all(part.how for part in ready[token])
        }
        if sought:
            oldest = min(part.owner.claimed_at for token in sought for part in ready[token])
            done |= find_written_tokens(folder, sought, oldest)
        return done


def file_sizes(folder: str) -> dict[str, int]:
    """Return the length of each file of the history; raise OSError."""
    return {name: os.lstat(f"{folder}/{name}").st_size for name in list_months(folder)}
