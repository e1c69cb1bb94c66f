# SPDX-License-Identifier: Apache-2.0
"""Where a job's claims are found: the locks, `released/`, the history, and REPORT_DIR.

Only looks: nothing is changed, no lock waited for, and what cannot be read is left out. Whoever
may read these files may see the report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gpulock.daemon.history.claim_samples import Advice
from gpulock.daemon.history.collect import read_part
from gpulock.daemon.history.files import FOLDER
from gpulock.daemon.history.pending import of_this_boot
from gpulock.daemon.history.record import Part, record_of
from gpulock.deadline import boottime
from gpulock.errors import SENSELESS, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.report import folder
from gpulock.report.claims import Claim, claim_of
from gpulock.report.scan import Faults, Query
from gpulock.report.scan import claims as scan_claims
from gpulock.store import kv
from gpulock.store.owner import Owner

MONTH = 30 * 86400.0  # seconds: an id that comes again after so long is another job's


def claims_of(node: Node, query: Query, faults: Faults, uid: int | None = None) -> list[Claim]:
    """Return the claims of the last job of that name, from the first to the last.

    With `uid` only those of its owner. Raises Refusal where it is not told who that is.
    """
    found = {claim.token: claim for claim in scan_claims(history_of(node), query, faults)}
    here = {claim.token: claim for claim in at_hand(node, lambda owner: asked(owner, query))}
    found = here | found  # what is in the history has its last word
    if uid is not None:
        found = {token: claim for token, claim in found.items() if claim.uid == uid}
    if node.settings.report_dir:
        shared = folder.read(node.settings.report_dir, query, faults)
        for claim in believed(shared, found.values(), uid, os.getuid()):
            found.setdefault(claim.token, claim)
    return of_last(list(found.values()))


def believed(
    shared: Sequence[Claim], known: Collection[Claim], uid: int | None, asking: int
) -> list[Claim]:
    """Return what of REPORT_DIR is of the job's owner: anybody may file a job of that number.

    The owner is `uid`, else whom this node's own records name, else whoever asks, where he has
    any. Where several others claim the job, nobody is believed: raises Refusal.
    """
    if uid is not None:
        return [claim for claim in shared if claim.uid == uid]
    uids = {claim.uid for claim in known} or {asking}
    own = [claim for claim in shared if claim.uid in uids]
    if own or known:
        return own
    owners = sorted({claim.uid for claim in shared})
    if len(owners) > 1:
        names = ", ".join([str(owner) for owner in owners[:5]])
        why = f"REPORT_DIR has reports of that job by uids {names}"
        raise Refusal(SENSELESS, why, "say whose job is meant: --uid UID")
    return list(shared)


def history_of(node: Node) -> str:
    """Return the folder of the history."""
    return f"{node.settings.state_dir}/{FOLDER}"


def asked(owner: Owner, query: Query) -> bool:
    """Return whether a record is of the job asked for."""
    return (
        owner.job_id == query.job
        and query.task in ("", owner.task_id or "1")
        and query.of_scheduler(owner.scheduler)
    )


def of_last(found: Sequence[Claim]) -> list[Claim]:
    """Return the claims of the job that was there last: ids come again, after years."""
    if not found:
        return []
    ordered = sorted(found, key=lambda claim: (claim.begun, claim.node, claim.token))
    last = ordered[-1]
    same = (last.uid, last.scheduler, last.cluster)
    kept: list[Claim] = []
    after = last.begun
    for claim in reversed(ordered):
        if (claim.uid, claim.scheduler, claim.cluster) != same:
            continue
        if after - (claim.ended or claim.begun) > MONTH:
            break
        kept.append(claim)
        after = claim.begun
    return kept[::-1]


def at_hand(node: Node, wanted: Callable[[Owner], bool]) -> list[Claim]:
    """Return the claims that stand, or whose line is not yet written."""
    return [claim_of(record) for record in records_at_hand(node, wanted)]


def records_at_hand(node: Node, wanted: Callable[[Owner], bool]) -> list[dict[str, Any]]:
    """Return the records of claims that stand, or that are released and not in the history."""
    standing: dict[str, list[Part]] = {}
    over: dict[str, list[Part]] = {}
    now, wall = boottime(), time.time()
    try:
        held = node.store.all() if node.store.exists() else {}
        for name, lock in held.items():
            record = lock.owner
            if record is not None and wanted(record):
                at = now if record.boot_id == node.boot_id else None
                standing.setdefault(record.token, []).append(Part(name, record, wall, at))
    except Refusal:
        pass
    for name in released_names(node):
        try:
            part = read_part(node.store, name)
        except (OSError, kv.MalformedError):
            continue
        if wanted(part.owner):
            over.setdefault(part.owner.token, []).append(part)
    if not standing and not over:
        return []
    advice, devices = Advice(node.settings.exporter_dir), devices_of(node)
    over = {
        token: list(of_this_boot(node, {part.device: part for part in parts}, wall).values())
        for token, parts in over.items()
    }
    found = [
        record_of([*parts, *over.pop(token, [])], advice, devices, standing=True)
        for token, parts in standing.items()
    ]
    return [*found, *(record_of(parts, advice, devices) for parts in over.values())]


def released_names(node: Node) -> list[str]:
    """Return the names of the released locks."""
    try:
        return os.listdir(node.store.released_dir)
    except OSError:
        return []


def devices_of(node: Node) -> dict[str, Device]:
    """Return the node's devices by id, none without a driver."""
    try:
        return {device.id: device for device in node.devices()}
    except Refusal:
        return {}
