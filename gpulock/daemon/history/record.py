# SPDX-License-Identifier: Apache-2.0
"""One claim that is over, or that still stands, as one JSON object of the history.

Warm. The order of the keys is part of the format: what a filter or a sum asks for stands first
(gpulock.report.scan reads a line no further than it must), the buckets stand last. What is not
known is null, never 0. Times are epoch seconds.

The exporter is an ordinary user, so each of its numbers is held against what root's own records
allow: a device cannot be observed for longer than it was held, nor work for longer than it was
observed. What cannot be true is not known.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpulock.errors import one_line
from gpulock.node import sample
from gpulock.node.devices import SHARE, Device, place_device
from gpulock.node.sample import BUCKETS, MILLI, ClaimUsage
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
SLACK: Final = 2.0  # seconds: a look begins before the claim and ends after the release
MOST_WATTS: Final = 20_000.0  # of one device: no board comes near to it
MOST_MEMORY: Final = 1 << 50  # bytes
MOST_PROCESSORS: Final = 1 << 13  # of a host that does not tell
FIRST_WIDTH, LONGEST_WIDTH = 1.0, 1e8  # seconds of a bucket
LONGEST_WAIT: Final = 60.0  # seconds that the history waits for the exporter


class DeviceUsage(NamedTuple):
    """What one device did for one claim; None is not known.

    `busy` and `observed` are seconds, `last_busy` the epoch, `idle` the observed seconds since
    it last worked, `seen` when that was last true (CLOCK_BOOTTIME). `used` and `covered` are
    milliseconds at work and observed in each bucket of `width` seconds.
    """

    busy: float | None = None
    observed: float = 0.0
    idle: float | None = None
    seen: float | None = None
    last_busy: float | None = None
    energy: float | None = None
    memory_peak: int | None = None
    foreign: float | None = None
    width: float | None = None
    used: tuple[int, ...] = ()
    covered: tuple[int, ...] = ()


UNKNOWN_USAGE: Final = DeviceUsage()


def clamp_device_usage(
    account: ClaimUsage, record: Owner, held: float, memory: int | None
) -> DeviceUsage:
    """Return what is believed of an account of a device held for `held` seconds.

    `memory` is the device's, in bytes, None where it is not known.
    """
    most = held + SLACK
    observed = min(account.observed or 0.0, held)
    busy = min(account.busy, observed) if account.busy is not None and observed else None
    width, used, covered = clamp_usage_buckets(account)
    peak, energy = account.memory_peak, account.energy
    return DeviceUsage(
        busy=busy,
        observed=observed,
        idle=min(account.idle, observed) if account.idle is not None and observed else None,
        seen=account.seen,
        last_busy=claim_time_to_epoch(account.last_busy, record, most) if busy else None,
        energy=energy if energy is not None and energy <= most * MOST_WATTS else None,
        memory_peak=peak if peak is not None and peak <= (memory or MOST_MEMORY) else None,
        foreign=min(account.foreign, held) if account.foreign is not None else None,
        width=width,
        used=used,
        covered=covered,
    )


def clamp_usage_buckets(
    account: ClaimUsage,
) -> tuple[float | None, tuple[int, ...], tuple[int, ...]]:
    """Return width and buckets, nothing where they make no sense."""
    width = account.width
    if width is None or not FIRST_WIDTH <= width <= LONGEST_WIDTH:
        return None, (), ()
    whole = round(width * MILLI)
    covered = tuple([min(one, whole) for one in account.covered[:BUCKETS]])
    used = tuple([min(*both) for both in zip(account.used, covered)])
    return width, used, covered[: len(used)]


def claim_time_to_epoch(boottime: float | None, record: Owner, most: float) -> float | None:
    """Return a moment of a claim by the clock of its record, None for one outside of it."""
    if boottime is None:
        return None
    after = boottime - record.claimed_boottime
    return record.claimed_at + after if -SLACK <= after <= most else None


class ExporterSamples:
    """The exporter's folder, and the last sample in it, however old."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.last = sample.load_sample_file(f"{folder}/{sample.SAMPLE}", sample.SAMPLE_LINE)

    def read_claim_accounts(self, record: Owner, standing: bool) -> dict[str, ClaimUsage]:
        """Return the usage of a claim, by lock id: its last account, or the last sample's."""
        left = None if standing else sample.read_finished_claim(self.folder, record.token)
        for found in (left, self.last):
            if found and found.boot_id == record.boot_id and record.token in found.tokens:
                return found.tokens[record.token]
        return {}

    def may_come(self, token: str, boot_id: str, released_at: float, now: float) -> bool:
        """Return whether the exporter, alive, has yet to write what is left of a claim.

        Times are epoch seconds. It closes an account within a second or two of the release, or
        five where the driver does not answer; nobody waits for longer than LONGEST_WAIT.
        """
        if not -sample.AHEAD <= now - released_at <= LONGEST_WAIT:  # written to the millisecond
            return False
        found = self.last
        if found is None or found.boot_id != boot_id or found.wall is None:
            return False
        if now - found.wall > sample.FRESH or sample.read_finished_claim(self.folder, token):
            return False
        return token in found.tokens or found.wall < released_at + SLACK


class ClaimedDevice(NamedTuple):
    """One device of a claim: its owner record, when it was released (epoch seconds) and how.

    `held` is for how many seconds, at least, it was held (None: not known), by the clock of the
    claim's boot where the end was `noted`.
    """

    device: str
    owner: Owner
    at: float
    how: str = ""
    held: float | None = None
    noted: bool = False

    @property
    def card(self) -> str:
        """Return its device, of a share its card."""
        return self.device.partition(SHARE)[0]


def build_history_record(
    parts: Sequence[ClaimedDevice],
    advice: ExporterSamples,
    devices: Mapping[str, Device],
    standing: bool = False,
) -> dict[str, Any]:
    """Return the record of a claim from all of its devices; `standing`: it is not over."""
    parts = sorted(parts, key=lambda part: part.device)
    accounts = advice.read_claim_accounts(parts[0].owner, standing)
    found: list[tuple[ClaimedDevice, DeviceUsage, int | None]] = []
    for part in parts:
        device = place_device(devices, part.device)
        memory = device.memory_mib << 20 or None if device else None
        observed = advice.last.devices.get(part.card) if advice.last else None
        if observed and observed.memory_total and observed.memory_total <= MOST_MEMORY:
            memory = observed.memory_total
        account, held, usage = accounts.get(part.device), part.held, UNKNOWN_USAGE
        if account is not None and held is not None:
            usage = share_usage(clamp_device_usage(account, part.owner, held, memory), part)
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
        "gpus": len({part.card for part in parts}),
        "gpu_seconds": join_known_values(sum, [card_seconds(part) for part in parts]),
        "busy_seconds": join_known_values(sum, [usage.busy for usage in usages]),
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
        "held_seconds": join_known_values(max, [part.held for part in parts]),
        "utilization": usage_utilization(usages),
        "energy_joules": join_known_values(sum, [usage.energy for usage in usages]),
        "memory_peak_bytes": max([u.memory_peak for u in usages if u.memory_peak], default=None),
        "last_busy": join_known_values(max, [usage.last_busy or None for usage in usages]),
        "foreign_seconds": join_known_values(sum, [usage.foreign for usage in usages]),
        **host_usage_fields(accounts.values(), max([part.held or 0.0 for part in parts])),
        "devices": [
            build_history_device(part, usage, place_device(devices, part.device), memory)
            for part, usage, memory in found
        ],
        "shapes": {
            part.card: {"width": usage.width, "use": bucket_utilization(usage)}
            for part, usage, _ in found
            if usage.width is not None
        },
    }


def host_usage_fields(accounts: Iterable[ClaimUsage], held: float) -> dict[str, Any]:
    """Return what a claim's job used of its host in `held` seconds, as each account has it."""
    told = list(accounts)
    processors = os.cpu_count() or MOST_PROCESSORS
    cpus = max([one.cpus for one in told if one.cpus], default=None)
    spent = [one.cpu_seconds for one in told if one.cpu_seconds is not None]
    peak = max([one.host_memory_peak for one in told if one.host_memory_peak], default=None)
    limit = max([one.host_memory for one in told if one.host_memory], default=None)
    believed = bool(spent) and max(spent) <= (held + SLACK) * processors
    return {
        "cpu_seconds": round_to_milli(max(spent)) if believed else None,
        "cpus": cpus if cpus and cpus <= processors else None,
        "host_memory_peak_bytes": peak if peak and peak <= MOST_MEMORY else None,
        "host_memory_bytes": limit if limit and limit <= MOST_MEMORY else None,
    }


def card_seconds(part: ClaimedDevice) -> float | None:
    """Return for how long a device was held; a place of N counts as the Nth part of its card.

    So the parts of a card are no more than the card. Of a part that nobody counted, as a shard of
    Slurm, it is not known.
    """
    if part.card == part.device or part.held is None:
        return part.held
    return part.held / part.owner.places if part.owner.places else None


def share_usage(usage: DeviceUsage, part: ClaimedDevice) -> DeviceUsage:
    """Return a device's usage; of a place of N the Nth part of the seconds, as `card_seconds`."""
    if part.card == part.device:
        return usage
    if not part.owner.places:
        return UNKNOWN_USAGE._replace(memory_peak=usage.memory_peak)
    busy = None if usage.busy is None else usage.busy / part.owner.places
    observed = usage.observed / part.owner.places
    return usage._replace(busy=busy, observed=observed, energy=None)  # all places take the energy


def bucket_utilization(usage: DeviceUsage) -> list[int | None]:
    """Return the use in each bucket, in thousandths of what was observed; None: nothing was."""
    both = zip(usage.used, usage.covered)
    return [round(MILLI * used / covered) if covered else None for used, covered in both]


def build_history_device(
    part: ClaimedDevice, usage: DeviceUsage, device: Device | None, memory: int | None
) -> dict[str, Any]:
    """Return one device of a record."""
    minor = part.owner.minor  # N of its /dev/nvidiaN
    plain = minor.isascii() and minor.isdigit()
    return {
        "id": part.card,
        "held_seconds": round_to_milli(card_seconds(part)),
        "busy_seconds": round_to_milli(usage.busy),
        "observed_seconds": round_to_milli(usage.observed),
        "index": device.index if device else None,
        "minor": int(minor) if plain and len(minor) <= MINOR_DIGITS else None,
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
        **(
            {"share": True, "places": part.owner.places or None} if part.card != part.device else {}
        ),
    }


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


def join_known_values(
    join: Callable[[Iterable[float]], float], values: Sequence[float | None]
) -> float | None:
    """Return the sum, or the largest, of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return round_to_milli(join(known)) if known else None


def round_to_milli(value: float | None) -> float | None:
    """Return a number to the millisecond or millijoule; what is no number is not known."""
    return round(float(value), 3) if value is not None and math.isfinite(value) else None


def encode_history_record(record: Mapping[str, Any]) -> bytes:
    """Return the record as one line; a character that is no text is escaped."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def is_whole_record(line: bytes) -> bool:
    """Return whether a line is a record.

    A power cut may leave the beginning of one record, zeros, and the end of another in one line.
    """
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
