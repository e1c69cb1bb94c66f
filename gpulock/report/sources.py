# SPDX-License-Identifier: Apache-2.0
"""Where a job's claims are found: locks, records of what is over, and the history.

Only looks: nothing is changed, no lock waited for, and what cannot be read is told. A user who may
read these files may see the report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from gpulock.daemon.history.pending import read_ended_claim, read_released_devices
from gpulock.daemon.history.record import ClaimedDevice, ExporterSamples, build_history_record
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.report.claims import ReportedClaim, parse_reported_claim
from gpulock.report.scan import (
    ClaimQuery,
    HistoryFaults,
    find_history_heads,
    parse_heads,
)
from gpulock.store.grants import OWED
from gpulock.store.kv import MalformedError
from gpulock.store.locks import list_names
from gpulock.store.owner import Owner

MONTH = 30 * 86400.0  # seconds: an id that comes again after so long is another job's


def find_job_claims(node: Node, query: ClaimQuery, faults: HistoryFaults) -> list[ReportedClaim]:
    """Return the claims of the last job of that name here, from the first to the last."""
    by_token = {claim.owner.token: claim for claim in find_local_claims(node, query.fits, faults)}
    heads = find_history_heads(node, query, faults)
    for claim in parse_heads(heads, faults):
        by_token[claim.owner.token] = claim  # what is in the history has its last word
    return select_last_job(by_token.values())


def find_last_claim(node: Node, query: ClaimQuery, faults: HistoryFaults) -> ReportedClaim | None:
    """Return the claim that ended last, whether the history has its line yet or not."""
    if ended := find_unwritten_claims(node, query, faults):
        return max(ended, key=lambda claim: claim.ended or 0.0)
    heads = find_history_heads(node, query, faults, 1)
    return next(parse_heads(heads, faults), None)


def find_unwritten_claims(
    node: Node, query: ClaimQuery, faults: HistoryFaults
) -> list[ReportedClaim]:
    """Return the claims that are over, and have no line in the history yet."""
    return [
        claim
        for claim in find_local_claims(node, query.fits, faults)
        if claim.ended is not None
        and query.since <= claim.ended < query.until
        and query.device in ("", *(card.id for card in claim.cards))
    ]


def select_last_job(claims: Iterable[ReportedClaim]) -> list[ReportedClaim]:
    """Return the claims of the job that was there last: ids come again, after years."""
    kept: list[ReportedClaim] = []
    for claim in sorted(claims, key=lambda claim: (claim.begun, claim.owner.token), reverse=True):
        last, own = kept[-1] if kept else claim, claim.owner
        if (own.uid, *own.key()[:2]) != (last.owner.uid, *last.owner.key()[:2]):
            continue
        if last.begun - (claim.ended or claim.begun) > MONTH:
            break
        kept.append(claim)
    return kept[::-1]


def find_local_claims(
    node: Node, wanted: Callable[[Owner], bool], faults: HistoryFaults
) -> list[ReportedClaim]:
    """Return the claims that stand, or that are over and not in the history.

    Of one that is over there may be the copy in STATE_DIR/owed alone, after a reboot.
    """
    standing: dict[str, Owner] = {}
    over: dict[str, list[ClaimedDevice]] = {}
    now, wall = clock_boottime(), time.time()
    unread: dict[str, str] = {}
    try:
        owners = [lock.owner for lock in node.store.read_all_locks(unread).values()]
        standing = {one.token: one for one in owners if one and wanted(one)}
        copies = list_names(f"{node.settings.state_dir}/{OWED}")
        finished = list_names(node.store.finished_dir)  # last: what ends meanwhile is in both
    except Refusal as fault:
        faults.files.append(fault.why)
        copies = finished = []
    faults.files += [f"claim {token}: {why}" for token, why in unread.items()]
    for token in {*copies, *finished}:
        try:
            ended = read_ended_claim(node, token, wall)
        except FileNotFoundError:
            continue  # its line was written meanwhile
        except (OSError, MalformedError) as fault:
            faults.files.append(f"claim {token}: {fault}")
            continue
        if not ended or not wanted(ended[0].owner):
            continue
        if token in finished or (
            ended[0].owner.boot_id != node.boot_id
            and not os.path.lexists(f"{node.store.claims_dir}/{token}")
        ):
            over[token] = ended
    if not standing and not over:
        return []
    samples = ExporterSamples(node.settings.exporter_dir)
    devices = {device.id: device for device in node.devices_if_driver()}
    records = [build_history_record(parts, samples, devices) for parts in over.values()]
    for record in [record for token, record in standing.items() if token not in over]:
        seconds = now - record.claimed_boottime
        held = seconds if record.boot_id == node.boot_id and seconds >= 0 else None
        parts = {name: ClaimedDevice(name, record, wall, held=held) for name in record.devices}
        with suppress(OSError):  # what it gave back already
            parts = read_released_devices(f"{node.store.claims_dir}/{record.token}", record) | parts
        records.append(build_history_record([*parts.values()], samples, devices, standing=True))
    return [parse_reported_claim(record) for record in records]
