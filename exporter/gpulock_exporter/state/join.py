# SPDX-License-Identifier: Apache-2.0
"""What is to be told of a node at one moment: devices, locks, verdicts and use, joined. Pure.

The states are those of `gpulock.alloc.states`, from the same facts that `gpulock status` has. Values of
the driver that are older than a limit are left out; what the lock directory says stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpulock.alloc import states
from gpulock.alloc.liveness import DEAD, UNKNOWN
from gpulock.node.devices import Device, overlaps
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock_exporter import telemetry
from gpulock_exporter.state.claim_accounting import Ledger
from gpulock_exporter.state.device_totals import DeviceTotals, Totals
from gpulock_exporter.state.local_state import Facts
from gpulock_exporter.state.node_devices import merged
from gpulock_exporter.state.snapshot import Counts, Heard, Limits, Seen


def join(
    listed: Sequence[Device] | None,
    heard: Heard,
    facts: Facts,
    totals: Totals,
    ledger: Ledger,
    limits: Limits,
    offset: float,
) -> tuple[tuple[Seen, ...], Mapping[str, int] | None]:
    """Return the devices, and how many are in each state; `offset` makes a boottime epoch."""
    looked = heard.now()
    devices = merged(listed, looked, heard.devices)
    rows = rows_of(devices, heard, facts, ledger, limits)
    found = [device_of(row, heard, facts, totals, ledger, offset) for row in named(rows, totals)]
    known = {one.id for one in found}
    for name, values in (looked or {}).items():  # a card in MIG mode, or one that has no row yet
        if name not in known:
            row = states.Row(name, None, None, "", "")
            found.append(device_of(row, heard, facts, totals, ledger, offset, values))
    found.sort(key=lambda one: (one.card is None, one.card or 0, one.id))
    locks_known = facts.locks is not None and devices is not None
    return unique(found), states.counts(rows) if locks_known else None


def unique(found: Sequence[Seen]) -> tuple[Seen, ...]:
    """Return the devices, each with an identity of its own: two of one name spoil a scrape."""
    taken: set[str] = set()
    result: list[Seen] = []
    for one in found:
        single = replace(one, uuid=one.id) if one.uuid in taken else one
        taken.add(single.uuid)
        result.append(single)
    return tuple(result)


def rows_of(
    devices: list[Device] | None, heard: Heard, facts: Facts, ledger: Ledger, limits: Limits
) -> list[states.Row]:
    """Return one row a device, as `gpulock.alloc.states` judges."""
    held = facts.locks or {}
    foreign = frozenset(name for name, on in heard.present.items() if on.foreign and heard.fresh)
    idle = idle_ids(held, ledger, limits, heard.at) if heard.fresh else frozenset[str]()
    expected = limits.gpus if devices is not None else 0
    out = facts.quarantined or {}
    return states.rows(devices or [], held, out, facts.verdicts, expected, foreign, idle)


def idle_ids(held: Mapping[str, Lock], ledger: Ledger, limits: Limits, at: float) -> frozenset[str]:
    """Return the locked devices that are observed to do nothing, and were for long.

    `at` is the last look: one that is not observed any more is not known to be idle.
    """
    found: set[str] = set()
    for name, lock in held.items():
        account = ledger.of(name, lock.owner.token) if lock.owner else None
        if account is None or account.seen is None or at - account.seen > limits.oldest:
            continue
        if account.idle >= limits.idle_after:
            found.add(name)
    return frozenset(found)


def named(rows: Sequence[states.Row], totals: Totals) -> list[states.Row]:
    """Return the rows that stand for a device of a name.

    One that is only known to be missing gets that of a device which was here in this boot and is
    gone, in order of their places.
    """
    found = [row for row in rows if row.device or row.lock]
    unnamed = [row for row in rows if not (row.device or row.lock)]
    if not unnamed:
        return found
    here = {row.id.partition(".gi")[0] for row in found}
    gone = [name for name in sorted(totals.places) if ".gi" not in name and name not in here]
    given = zip(unnamed, gone, strict=False)
    return found + [states.Row(name, None, None, row.state, row.reason) for row, name in given]


def device_of(
    row: states.Row,
    heard: Heard,
    facts: Facts,
    totals: Totals,
    ledger: Ledger,
    offset: float,
    values: telemetry.Device | None = None,
) -> Seen:
    """Return one device with all that is known of it."""
    counted = totals.of(row.id)
    values = values or (heard.devices.get(row.id) if heard.fresh else None)
    record = row.lock.owner if row.lock else None
    uuid = row.device.uuid if row.device else record.uuid if record else ""
    known = facts.locks is not None
    account = ledger.of(row.id, record.token) if record else None
    last_busy = counted.last_busy if counted else None
    return Seen(
        id=row.id,
        uuid=(counted.key if counted else "") or (values.uuid if values else "") or uuid or row.id,
        card=card_of(row, values, counted),
        instance=instance_of(row.id),
        state=row.state if known and row.state else None,
        reason=row.reason,
        lock=row.lock if known else None,
        stale=stale(record, facts),
        quarantined=quarantined(row, facts) if row.state else None,
        values=values,
        counts=counts_of(counted, heard.since) if counted and values else Counts(),
        xids={xid: (of.count, of.at + offset) for xid, of in counted.xids.items()}
        if counted
        else {},
        last_busy=last_busy + offset if last_busy is not None else None,
        present=heard.present.get(row.id) if heard.fresh else None,
        idle=account.idle if account and account.observed else None,
    )


def instance_of(name: str) -> str:
    """Return which instance of its card a lock id stands for: `gi1.ci0`, empty for a card."""
    _, dot, rest = name.partition(".gi")
    return f"gi{rest}" if dot else ""


def quarantined(row: states.Row, facts: Facts) -> bool | None:
    """Return whether a device is out of service, also one that is missing besides."""
    if facts.quarantined is None:
        return None
    orphans = row.lock is not None and bool(row.lock.orphans)
    return orphans or any(overlaps(name, row.id) for name in facts.quarantined)


def card_of(
    row: states.Row, values: telemetry.Device | None, counted: DeviceTotals | None
) -> int | None:
    """Return the index of a device's card, None where it has none or nobody knows."""
    if row.device is not None:
        return row.device.index if row.device.index >= 0 else None
    if values is not None:
        return values.index
    return counted.index if counted else None


def stale(record: Owner | None, facts: Facts) -> bool | None:
    """Return whether a lock's owner is proven dead; None where the last reconcile cannot say."""
    verdict = (facts.verdicts or {}).get(record.token) if record else None
    if verdict is None or verdict.state == UNKNOWN:
        return None
    return verdict.state == DEAD


def counts_of(totals: DeviceTotals, since: float) -> Counts:
    """Return a copy of a device's counters, which go on meanwhile.

    One that could not be read since then is not known: standing still, it would say that nothing
    happened.
    """
    return Counts(
        totals.busy if totals.observable else None,
        totals.observed if totals.observable else None,
        {
            name: one.total
            for name, one in totals.counters.items()
            if one.last is not None and one.last.at >= since
        },
    )
