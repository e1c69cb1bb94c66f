# SPDX-License-Identifier: Apache-2.0
"""What a reconcile found that an administrator must know, in lines. Pure.

What was freed is told each time, with its proof. What lasts (a lock of nobody we know, a missing
card) has a key that stays the same while it does, so that it is told once.
"""

from __future__ import annotations

from gpulock.alloc.reaper import FREED, ORPHANS, ReapOutcome
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.node.devices import SHARE, card_bus_id
from gpulock.store.owner import Owner
from gpulock.store.quarantine import LOST, QUARANTINE_AGAIN
from gpulock.store.verdicts import UNKNOWN

BLIND = "processes cannot be seen, so their locks are not freed: "


def describe_lock_owner(record: Owner | None) -> str:
    """Return ` of job 12 (alice)`, or nothing for a lock without owner."""
    if record is None:
        return ""
    job = record.job() if record.scheduler in ("process", "admin") else f"job {record.job()}"
    return f" of {job} ({record.user or record.uid})"


def reconcile_event_messages(report: ReconcileReport) -> list[str]:
    """Return a line for each claim that was put back or freed, with the proof."""
    lines = [
        f"restored {' '.join(record.devices)}{describe_lock_owner(record)}: "
        "lock or record was removed"
        for record in report.restored
    ]
    groups: dict[tuple[str, str], list[str]] = {}
    for outcome in report.outcomes:
        if outcome.act == FREED:
            key = (describe_lock_owner(outcome.lock.owner), outcome.reason)
            groups.setdefault(key, []).append(outcome.lock.id)
    return lines + [f"freed {' '.join(ids)}{of}: {why}" for (of, why), ids in groups.items()]


def lasting_problem_messages(report: ReconcileReport, expected: int) -> dict[str, str]:
    """Return what lasts, by a key; `expected` GPUs, 0 where that is not known."""
    messages: dict[str, str] = {}
    if report.blind:
        messages["blind"] = f"{BLIND}{report.blind}"
    if report.fault:
        messages["fault"] = f"the verdicts cannot be published: {report.fault}"
    if report.notes_lost:
        messages["notes"] = f"STATE_DIR{LOST}; {QUARANTINE_AGAIN}"
    if report.driver:
        messages["driver"] = report.driver
    for device in report.devices:
        if device.fault:
            messages[f"fault {device.id}"] = f"GPU {device.id}: {device.fault}"
    known = {device.bus for device in report.devices}
    if 0 < len(known) < expected or (expected and not known and not report.driver):
        text = f"{expected} GPUs expected (EXPECTED_GPUS=), {len(known)} are there"
        messages[f"missing {len(known)}"] = text
    for outcome in report.outcomes:
        lock = outcome.lock
        if outcome.act == FREED:
            continue
        if known and (bus := card_bus_id(lock.id)) not in known:
            messages[f"gone {bus}"] = f"{bus} is locked, but the driver does not show it"
        if line := unfreed_lock_message(outcome, report.blind):
            messages[f"{lock.id} {lock.owner.token if lock.owner else ''} {outcome.act}"] = line
    return messages


def unfreed_lock_message(outcome: ReapOutcome, blind: str) -> str:
    """Return the message on one lock that stays, or nothing where it just is in use."""
    of = f"{outcome.lock.id}{describe_lock_owner(outcome.lock.owner)}"
    if outcome.act == ORPHANS:
        return f"{of} is not freed: its owner is dead, but {outcome.reason}"
    if outcome.verdict.state == UNKNOWN and outcome.reason != blind:
        return f"{of} is not freed, its holder is not known: {outcome.reason}"
    return ""


def format_daemon_status(report: ReconcileReport, expected: int) -> str:
    """Return how things stand, for the service manager."""
    held = [outcome for outcome in report.outcomes if outcome.act != FREED]
    unknown = [outcome for outcome in held if outcome.verdict.state == UNKNOWN]
    total = max(expected, len(report.devices))
    devices = {outcome.lock.id.partition(SHARE)[0] for outcome in held}
    text = f"{len(devices)} of {total} devices held"
    if unknown:
        text += f", {len(unknown)} by an unknown owner"
    if report.driver:
        text += f"; {report.driver}"
    return f"{text}; {report.fault}" if report.fault else text
