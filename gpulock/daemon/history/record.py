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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpulock.errors import one_line
from gpulock.node import sample
from gpulock.node.devices import SHARE, Device
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
NO_HOST_USAGE: Final[dict[str, Any]] = dict.fromkeys(
    ("cpu_seconds", "cpus", "host_memory_peak_bytes", "host_memory_bytes")
)


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


class ToldDevice(NamedTuple):
    """What is told of one device: its card, for how long that was the claim's (None: unknown)."""

    card: str
    seconds: float | None
    usage: DeviceUsage
    fields: dict[str, Any]


def build_history_record(
    parts: Sequence[ClaimedDevice],
    advice: ExporterSamples,
    devices: Mapping[str, Device],
    standing: bool = False,
) -> dict[str, Any]:
    """Return the record of a claim from all of its devices; `standing`: it is not over."""
    parts = sorted(parts, key=lambda part: part.device)
    last = max(parts, key=lambda part: (part.at, part.device))
    owner = last.owner
    accounts: Mapping[str, ClaimUsage] = {}
    left = None if standing else sample.read_finished_claim(advice.folder, owner.token)
    for told in (advice.last, left):  # the last account of the claim counts, if there is one
        if told and told.boot_id == owner.boot_id:
            accounts = told.tokens.get(owner.token, accounts)
    found = [
        build_history_device(part, accounts.get(part.device), devices, advice.last)
        for part in parts
    ]
    how, proof = parse_release_reason(last.how)
    usages = [one.usage for one in found]
    held = max([part.held or 0.0 for part in parts])
    return {
        "version": VERSION,
        "released_at": None if standing else round_to_milli(last.at),
        "claimed_at": round_to_milli(owner.claimed_at),
        "user": owner.user,
        "gpus": len({one.card for one in found}),
        "gpu_seconds": join_known_values(sum, [one.seconds for one in found]),
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
        **(host_usage_fields(accounts.values(), held) if accounts else NO_HOST_USAGE),
        "devices": [one.fields for one in found],
        "shapes": {
            one.card: {"width": one.usage.width, "use": bucket_utilization(one.usage)}
            for one in found
            if one.usage.width is not None
        },
    }


def host_usage_fields(told: Collection[ClaimUsage], held: float) -> dict[str, Any]:
    """Return what a claim's job used of its host in `held` seconds, as each account has it."""
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


def share_of_card(
    seconds: float | None, usage: DeviceUsage, places: int
) -> tuple[float | None, DeviceUsage]:
    """Return seconds held and usage of a place of N: the Nth part of those of its card.

    So the parts of a card are no more than the card. Of a part that nobody counted, as a shard of
    Slurm, they are not known.
    """
    if not places:
        return None, UNKNOWN_USAGE._replace(memory_peak=usage.memory_peak)
    busy = None if usage.busy is None else usage.busy / places
    usage = usage._replace(busy=busy, observed=usage.observed / places)
    # all places take the energy
    return None if seconds is None else seconds / places, usage._replace(energy=None)


def bucket_utilization(usage: DeviceUsage) -> list[int | None]:
    """Return the use in each bucket, in thousandths of what was observed; None: nothing was."""
    both = zip(usage.used, usage.covered)
    return [round(MILLI * used / covered) if covered else None for used, covered in both]


def build_history_device(
    part: ClaimedDevice,
    account: ClaimUsage | None,
    devices: Mapping[str, Device],
    last: sample.Sample | None,
) -> ToldDevice:
    """Return one device of a record, `last` being the last sample of the exporter."""
    card, share, _ = part.device.partition(SHARE)
    device = devices.get(card)
    memory = device.memory_mib << 20 or None if device else None
    observed = last.devices.get(card) if last else None
    if observed and observed.memory_total and observed.memory_total <= MOST_MEMORY:
        memory = observed.memory_total
    seconds, usage = part.held, UNKNOWN_USAGE
    if account is not None and seconds is not None:
        usage = clamp_device_usage(account, part.owner, seconds, memory)
    if share:
        seconds, usage = share_of_card(seconds, usage, part.owner.places)
    minor = part.owner.minor  # N of its /dev/nvidiaN
    plain = minor.isascii() and minor.isdigit()
    fields = {
        "id": card,
        "held_seconds": round_to_milli(seconds),
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
        **({"share": True, "places": part.owner.places or None} if share else {}),
    }
    return ToldDevice(card, seconds, usage, fields)


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
