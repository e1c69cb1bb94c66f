# SPDX-License-Identifier: Apache-2.0
"""One claim that is over, or that still stands, as one JSON object of the history; pure.

Warm. The order of the keys is part of the format: what a filter or a sum asks for stands first
(gpulock.report.scan reads a line no further than it must), the buckets stand last. What is not
known is null, never 0. Times are epoch seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpulock.daemon.history.claim_samples import (
    UNKNOWN_USAGE,
    DeviceUsage,
    ExporterSamples,
    clamp_device_usage,
)
from gpulock.errors import one_line
from gpulock.node.devices import Device
from gpulock.node.sample import MILLI
from gpulock.store.owner import Owner

VERSION: Final = 1
MINOR_DIGITS: Final = 6
RELEASE_REASONS: Final = (  # how a lock says it was released, and the word for it
    ("epilog", "epilog"),
    ("reap: ", "reap"),
    ("claim: ", "claim"),
    ("claim undone", "undone"),
    ("release --force by ", "admin"),
    ("unreserved by ", "admin"),
    ("released by ", "release"),
)


class ClaimedDevice(NamedTuple):
    """One device of a claim: its owner record, when it was released and how.

    `at` is epoch seconds, `boottime` the same moment by the clock of the claim's boot (None: not
    noted), `how` as the lock says. `least` is for how many seconds it was held at least, for where
    the end was not noted; None: that is not known either.
    """

    device: str
    owner: Owner
    at: float
    boottime: float | None = None
    how: str = ""
    least: float | None = None

    def held(self) -> float | None:
        """Return for how many seconds it was held, at least; None: not known."""
        if self.boottime is not None and self.boottime >= self.owner.claimed_boottime:
            return self.boottime - self.owner.claimed_boottime
        return self.least if self.least is not None and self.least >= 0 else None


def build_history_record(
    parts: Sequence[ClaimedDevice],
    advice: ExporterSamples,
    devices: Mapping[str, Device],
    standing: bool = False,
) -> dict[str, Any]:
    """Return the record of a claim from all of its devices; `standing`: it is not over."""
    parts = sorted(parts, key=lambda part: part.device)
    accounts = (
        advice.read_standing_accounts(parts[0].owner)
        if standing
        else advice.read_claim_accounts(parts[0].owner)
    )
    found: list[tuple[ClaimedDevice, DeviceUsage, int | None]] = []
    for part in parts:
        device = devices.get(part.device)
        memory = advice.memory(part.device) or device_memory_bytes(device)
        account = accounts.get(part.device)
        held = part.held()
        seen = account is not None and held is not None
        usage = (
            clamp_device_usage(account, part.owner, held or 0.0, memory) if seen else UNKNOWN_USAGE
        )
        found.append((part, usage, memory))
    last = max(parts, key=lambda part: (part.at, part.device))
    owner = last.owner
    how, proof = parse_release_reason(last.how)
    usages = [usage for _, usage, _ in found]
    return {
        "version": VERSION,
        "released_at": None if standing else round_to_milli(last.at),
        "claimed_at": round_to_milli(owner.claimed_at),
        "user": owner.user,
        "gpus": len(parts),
        "gpu_seconds": sum_known_values([part.held() for part in parts]),
        "busy_seconds": sum_known_values([usage.busy for usage in usages]),
        "observed_seconds": round_to_milli(sum(usage.observed for usage in usages)),
        "token": owner.token,
        "scheduler": owner.scheduler,
        "cluster": owner.cluster,
        "node": owner.slurmd or owner.node,
        "job_id": owner.job_id,
        "task_id": owner.task_id,
        "restart": owner.restart,
        "het_leader": owner.het_leader,
        "uid": owner.uid,
        "queue": owner.queue,
        "comment": owner.comment,
        "how": None if standing else how,
        "proof": proof,
        "held_seconds": max_known_value([part.held() for part in parts]),
        "utilization": usage_utilization(usages),
        "energy_joules": sum_known_values([usage.energy for usage in usages]),
        "memory_peak_bytes": max([u.memory_peak for u in usages if u.memory_peak], default=None),
        "last_busy": round_to_milli(
            max([u.last_busy for u in usages if u.last_busy], default=None)
        ),
        "foreign_seconds": sum_known_values([usage.foreign for usage in usages]),
        "devices": [
            build_history_device(part, usage, devices.get(part.device), memory)
            for part, usage, memory in found
        ],
        "shapes": {
            part.device: {"width": usage.width, "use": bucket_utilization(usage)}
            for part, usage, _ in found
            if usage.width is not None
        },
    }


def bucket_utilization(usage: DeviceUsage) -> list[int | None]:
    """Return the use in each bucket, in thousandths of what was observed; None: nothing was."""
    both = zip(usage.used, usage.covered, strict=True)
    return [round(MILLI * used / covered) if covered else None for used, covered in both]


def build_history_device(
    part: ClaimedDevice, usage: DeviceUsage, device: Device | None, memory: int | None
) -> dict[str, Any]:
    """Return one device of a record."""
    return {
        "id": part.device,
        "held_seconds": round_to_milli(part.held()),
        "busy_seconds": round_to_milli(usage.busy),
        "observed_seconds": round_to_milli(usage.observed),
        "index": device.index if device else None,
        "minor": parse_owner_minor(part.owner),
        "uuid": part.owner.uuid or (device.uuid if device else "") or None,
        "model": (one_line(device.model) if device else "") or None,
        "profile": (device.profile if device else "") or None,
        "memory_bytes": memory,
        "utilization": usage_utilization([usage]),
        "energy_joules": round_to_milli(usage.energy),
        "memory_peak_bytes": usage.memory_peak,
        "last_busy": round_to_milli(usage.last_busy),
        "foreign_seconds": round_to_milli(usage.foreign),
        "how": parse_release_reason(part.how)[0],
    }


def parse_owner_minor(owner: Owner) -> int | None:
    """Return the N of its /dev/nvidiaN."""
    text = owner.minor
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MINOR_DIGITS else None


def device_memory_bytes(device: Device | None) -> int | None:
    """Return the memory that root's inventory tells, in bytes."""
    return (device.memory_mib << 20 or None) if device else None


def parse_release_reason(how: str) -> tuple[str, str]:
    """Return in a word how a lock was released, and by what proof or whom."""
    for beginning, word in RELEASE_REASONS:
        if how.startswith(beginning):
            return word, one_line(how[len(beginning) :]) if beginning.endswith(" ") else ""
    return ("other" if how else "unknown"), one_line(how)


def usage_utilization(usages: Sequence[DeviceUsage]) -> float | None:
    """Return the share of the observed time at work, None where nothing was observed."""
    observed = sum(usage.observed for usage in usages if usage.busy is not None)
    busy = sum(usage.busy for usage in usages if usage.busy is not None)
    return round(min(1.0, busy / observed), 4) if observed > 0 else None


def sum_known_values(values: Sequence[float | None]) -> float | None:
    """Return the sum of what is known, None where nothing is."""
    known = [value for value in values if value is not None]
    return round_to_milli(sum(known)) if known else None


def max_known_value(values: Sequence[float | None]) -> float | None:
    """Return the longest time that is known, None where none is."""
    return round_to_milli(max([value for value in values if value is not None], default=None))


def round_to_milli(value: float | None) -> float | None:
    """Return a number to the millisecond or millijoule; what is no number is not known."""
    return round(float(value), 3) if value is not None and math.isfinite(value) else None


def encode_history_record(record: Mapping[str, Any]) -> bytes:
    """Return the record as one line; a character that is no text is escaped."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
