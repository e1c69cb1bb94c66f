# SPDX-License-Identifier: Apache-2.0
"""The text of `sample` and of `finished/TOKEN`, and the exporter's memory back out of it.

`gpulock.daemon.core.sample` has the table of fields and the reader. Beside the fields, a device's
line has what the exporter itself goes on from after a restart: `c.<counter>` with total, last
reading and its time. Numbers are written in full, so that a counter read back is never below what
was served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from gpulock.daemon.core.sample import (
    COUNT,
    FINISHED_LINE,
    LIST,
    LOST,
    REAL,
    SAMPLE_LINE,
    TEXT,
    TYPES,
    ClaimUsage,
    DeviceSample,
    Sample,
)
from gpulock.errors import one_line
from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.claim_accounting import Accounts, Ledger, LedgerAccount, restore_buckets
from gpulock_exporter.state.collector_state import CollectorState, ExporterMemory
from gpulock_exporter.state.device_totals import (
    CounterReading,
    DeviceTotals,
    MonotonicCounter,
    TelemetryTotals,
)
from gpulock_exporter.state.snapshot import DeviceProcesses, LostCard, Moment

UNCORRECTED = "ecc.uncorrected."  # begins the names of counters
SHOWN_PIDS = 8  # of the foreign processes of a device

WRITTEN = {line: list(fields.items()) for line, fields in TYPES.items()}
WORDS: dict[str, Callable[[Any], str]] = {  # how a value of each type is written
    TEXT: one_line,
    COUNT: lambda value: str(int(value)),  # a yes is 1
    REAL: repr,
    LIST: lambda value: ",".join(map(str, value)),
}


def sample_text(state: CollectorState, now: Moment, fault: str = "") -> str:
    """Return the sample; `fault` says why there is no newer look."""
    memory, present = state.memory, state.present()
    lines = [
        SAMPLE_LINE,
        *format_fields(
            "",
            {
                "boot_id": state.boot_id,
                "sequence": memory.sequence,
                "looked": memory.totals.at,
                "driver": memory.totals.driver,
                "fault": fault,
                **vars(now),
            },
        ),
    ]
    for name, totals in sorted(memory.totals.devices.items()):
        known = totals, state.devices.get(name), present.get(name)
        lines.append(" ".join(["device", name, *sample_device_words(*known)]))
    for bus, lost in sorted(memory.lost.items()):
        lines.append(f"{LOST} {bus} {lost.since!r} {one_line(lost.why)}")
    for token, accounts in memory.ledger.accounts.items():
        lines += token_lines(token, accounts)
    return "\n".join(lines) + "\n"


def finished_text(token: str, accounts: Accounts, boot_id: str, now: Moment) -> str:
    """Return what is left of a claim."""
    head = format_fields("", {"boot_id": boot_id, **vars(now)})
    return "\n".join([FINISHED_LINE, *head, *token_lines(token, accounts)]) + "\n"


def format_fields(line: str, values: Mapping[str, Any]) -> list[str]:
    """Return `key=value` of each field of a line that is known; other values are left out."""
    return [
        f"{key}={WORDS[kind](value)}"
        for key, kind in WRITTEN[line]
        if (value := values.get(key)) is not None and value not in ("", (), [])
    ]


def sample_device_words(
    totals: DeviceTotals,
    device: DeviceTelemetry | None = None,
    present: DeviceProcesses | None = None,
) -> list[str]:
    """Return the fields of one device, and what the exporter remembers of it."""
    energy = totals.counters.get("energy")
    errors = [one.total for name, one in totals.counters.items() if name.startswith(UNCORRECTED)]
    values: dict[str, Any] = {
        **(vars(device) if device else {}),
        "uuid": totals.uuid,
        "index": totals.index,
        "looked": totals.looked,
        "busy": totals.busy if totals.observable else None,
        "observed": totals.observed if totals.observable else None,
        "last_busy": totals.last_busy,
        "energy": energy.total if energy and energy.last else None,
        "uncorrected": sum(errors) if errors else None,
        "processes": None,
    }
    if present is not None:
        values |= {
            "processes": present.nvml_count,
            "listed": present.at,
            "foreign": len(present.foreign),
            "unseen": present.unseen,
            "foreign_pids": present.foreign[:SHOWN_PIDS],
        }
    return format_fields("device", values) + [
        f"c.{name}={counter.total!r},{counter.last.value!r},{counter.last.since!r}"
        for name, counter in totals.counters.items()
        if counter.last is not None
    ]


def token_lines(token: str, accounts: Accounts) -> list[str]:
    """Return a line for each device of a claim."""
    return [
        " ".join(["token", token, name, *account_words(accounts[name])])
        for name in sorted(accounts)
    ]


def account_words(account: LedgerAccount) -> list[str]:
    """Return the fields of one account."""
    values = {**vars(account), **vars(account.buckets)}
    if not account.observed:
        values["busy"] = values["idle"] = None
    return format_fields("token", values)


# --- and back ---------------------------------------------------------------------------------


def restore_exporter_memory(sample: Sample | None, boot_id: str, now: float) -> ExporterMemory:
    """Return what an exporter of this boot remembered; nothing of another boot or of later."""
    if sample is None or sample.boot_id != boot_id or (sample.boottime or 0.0) > now:
        return ExporterMemory()
    devices = {name: restore_device_totals(name, seen) for name, seen in sample.devices.items()}
    totals = TelemetryTotals(devices, sample.driver)
    ledger = Ledger(
        {
            token: {name: restore_ledger_account(account) for name, account in of.items()}
            for token, of in sample.tokens.items()
        }
    )
    lost = {bus: LostCard(*why) for bus, why in sample.lost.items()}
    return ExporterMemory(totals, ledger, lost, sample.sequence or 0)


def restore_device_totals(name: str, seen: DeviceSample) -> DeviceTotals:
    """Return the counters of one device."""
    looked = seen.looked or 0.0
    totals = DeviceTotals(name, seen.uuid, seen.index or 0, looked)
    if seen.busy is not None and seen.observed is not None:
        totals.observable = True
        totals.busy, totals.observed = seen.busy, seen.observed
    totals.last_busy = seen.last_busy
    for word, text in seen.own.items():
        kind, _, what = word.partition(".")
        if kind == "c" and (three := parse_finite_numbers(text, 3)):
            last = CounterReading(three[1], looked, three[2])
            totals.counters[what] = MonotonicCounter(three[0], last)
    return totals


def restore_ledger_account(account: ClaimUsage) -> LedgerAccount:
    """Return one account as it was left."""
    since = account.since or 0.0
    buckets = restore_buckets(since, account.width, account.used, account.covered)
    known = {one.name: getattr(account, one.name, None) for one in fields(LedgerAccount)}
    known |= {"since": since, "until": account.until or since, "buckets": buckets}
    return LedgerAccount(**{name: value for name, value in known.items() if value is not None})


def parse_finite_numbers(text: str, count: int) -> list[float]:
    """Return so many finite numbers from 0, whole ones as such; none where they are not there."""
    try:
        numbers = [int(word) if word.isdecimal() else float(word) for word in text.split(",")]
    except ValueError:
        return []
    sound = len(numbers) == count and all(0 <= value < math.inf for value in numbers)
    return numbers if sound else []
