# SPDX-License-Identifier: Apache-2.0
"""One claim that is over, or that still stands, as one JSON object of the history.

Warm. The order of the keys is part of the format: what a filter or a sum asks for stands first,
and HEAD reads that alone. The buckets stand last. What is not known is null, and not 0: but for
`observed`, which is 0 where nothing was seen. Times are epoch seconds.

The exporter is an ordinary user, so each of its numbers is held against what root's own records
allow: a device cannot be observed for longer than it was held, nor work for longer than it was
observed. What cannot be true is not known.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpulock.daemon.core import sample
from gpulock.daemon.core.sample import BUCKETS, MILLI, ClaimUsage
from gpulock.errors import one_line
from gpulock.node.devices import SHARE, Device
from gpulock.store.owner import Owner

VERSION: Final = 1
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
FIRST_WIDTH, LONGEST_WIDTH = 1.0, 1e8  # seconds of a bucket
LONGEST_WAIT: Final = 60.0  # seconds that the history waits for the exporter
REAL: Final = rb"[0-9.]+"
REAL_OR_NULL: Final = REAL + rb"|null"
TEXT: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
HEAD_VALUES: Final = {
    "released_at": REAL,
    "claimed_at": REAL_OR_NULL,
    **dict.fromkeys(("token", "user", "scheduler", "job_id", "task_id", "queue"), TEXT),
    "gpus": rb"[0-9]+",
    **dict.fromkeys(("gpu_seconds", "busy_seconds", "observed_seconds"), REAL_OR_NULL),
}
HEAD: Final = re.compile(
    rb'\{"version":%d,' % VERSION
    + b"".join([b'"%b":(?P<%b>%b),' % (k.encode(), k.encode(), v) for k, v in HEAD_VALUES.items()])
)


class ClaimedDevice(NamedTuple):
    """One device of a claim: its owner record, when it was released (epoch seconds) and how.

    `held` is for how many seconds, at least, it was held (None: not known).
    """

    device: str
    owner: Owner
    at: float
    how: str = ""
    held: float | None = None


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
        last = self.last
        if last is None or last.boot_id != boot_id or last.wall is None:
            return False
        if now - last.wall > sample.FRESH or sample.read_finished_claim(self.folder, token):
            return False
        return token in last.tokens or last.wall < released_at + SLACK

    def accounts(self, owner: Owner, standing: bool) -> Mapping[str, ClaimUsage]:
        """Return the last account of each device of a claim, as far as there is one."""
        accounts: Mapping[str, ClaimUsage] = {}
        left = None if standing else sample.read_finished_claim(self.folder, owner.token)
        for one in (self.last, left):
            if one and one.boot_id == owner.boot_id:
                accounts = one.tokens.get(owner.token, accounts)
        return accounts

    def memory_bytes(self, card: str, device: Device | None) -> int | None:
        """Return the memory of a card, None where nobody knows it."""
        observed = self.last.devices.get(card) if self.last else None
        if observed and observed.memory_total and observed.memory_total <= MOST_MEMORY:
            return observed.memory_total
        return device.memory_mib << 20 or None if device else None


def build_history_record(
    parts: Sequence[ClaimedDevice],
    samples: ExporterSamples,
    devices: Mapping[str, Device],
    standing: bool = False,
) -> dict[str, Any]:
    """Return the record of a claim from all of its devices; `standing`: it is not over."""
    parts = sorted(parts, key=lambda part: part.device)
    last = max(parts, key=lambda part: (part.at, part.device))
    owner, accounts = last.owner, samples.accounts(last.owner, standing)
    rows: list[dict[str, Any]] = []
    shapes: dict[str, dict[str, Any]] = {}
    for part in parts:
        card = devices.get(part.device.partition(SHARE)[0])
        account = believable_account(part, accounts.get(part.device))
        rows.append(build_history_device(part, account, card, samples))
        if shape := use_over_time(account):
            shapes[rows[-1]["id"]] = shape
    how, proof = parse_release_reason(last.how)
    held = max([part.held for part in parts if part.held is not None], default=None)

    def known(key: str) -> list[float]:
        return [one[key] for one in rows if one[key] is not None]

    def total(key: str) -> float | None:
        return round_to_milli(sum(known(key))) if known(key) else None

    return {
        "version": VERSION,
        "released_at": None if standing else round_to_milli(last.at),
        "claimed_at": round_to_milli(owner.claimed_at),
        "token": owner.token,
        "user": owner.user,
        "scheduler": owner.scheduler,
        "job_id": owner.job_id,
        "task_id": owner.task_id,
        "queue": owner.queue,
        "gpus": len({one["id"] for one in rows}),
        "gpu_seconds": total("held_seconds"),
        "busy_seconds": total("busy_seconds"),
        "observed_seconds": total("observed_seconds"),
        "cluster": owner.cluster,
        "node": owner.slurmd or owner.node,
        "restart": owner.restart,
        "het_leader": owner.het_leader,
        "uid": owner.uid,
        "comment": owner.note or owner.comment,
        "how": None if standing else how,
        "proof": proof,
        "held_seconds": round_to_milli(held),
        "energy_joules": total("energy_joules"),
        "memory_peak_bytes": max(known("memory_peak_bytes"), default=None),
        "last_busy": max(known("last_busy"), default=None),
        "foreign_seconds": total("foreign_seconds"),
        "devices": rows,
        "shapes": shapes,
    }


def believable_account(part: ClaimedDevice, account: ClaimUsage | None) -> ClaimUsage:
    """Return the account of a device, without what depends on a time that is not known.

    Of a place that nobody counted, as a shard of Slurm, no time is the claim's.
    """
    if account is None or part.held is None:
        return ClaimUsage({})
    if SHARE in part.device and not part.owner.places:
        return ClaimUsage({"memory_peak": account.memory_peak})
    return account


def build_history_device(
    part: ClaimedDevice, account: ClaimUsage, device: Device | None, samples: ExporterSamples
) -> dict[str, Any]:
    """Return one device of a record.

    The times of a place of N are the Nth part of those of its card: so the parts of a card are no
    more than the card.
    """
    card, share, _ = part.device.partition(SHARE)
    owner, held, places = part.owner, part.held, 1
    memory = samples.memory_bytes(card, device)
    usage = believed_usage(account, owner, held or 0.0, memory)
    if share:
        held, places = (held if owner.places else None), owner.places or 1
        usage["energy_joules"] = None  # all places take it
    minor = owner.minor_of(part.device)  # N of its /dev/nvidiaN
    times = held, usage.pop("busy_seconds"), usage.pop("observed_seconds")
    held, busy, observed = [None if one is None else one / places for one in times]
    return {
        "id": card,
        "held_seconds": round_to_milli(held),
        "busy_seconds": round_to_milli(busy),
        "observed_seconds": round_to_milli(observed),
        "index": device.index if device else None,
        "minor": int(minor) if minor.isdecimal() else None,
        "uuid": owner.uuid_of(part.device) or (device.uuid if device else "") or None,
        "model": (one_line(device.model) if device else "") or None,
        "profile": (device.profile if device else "") or None,
        "memory_bytes": memory,
        **{key: round_to_milli(value) for key, value in usage.items()},
        "how": parse_release_reason(part.how)[0],
        **({"share": True, "places": owner.places or None} if share else {}),
    }


def believed_usage(
    account: ClaimUsage, owner: Owner, held: float, memory: int | None
) -> dict[str, float | None]:
    """Return what is believed of an account of a device held for `held` seconds.

    `memory` is the device's, in bytes, None where it is not known.
    """
    most = held + SLACK
    observed = min(account.observed or 0.0, held)
    busy = min(account.busy, observed) if account.busy is not None and observed else None
    peak, energy, foreign = account.memory_peak, account.energy, account.foreign
    last_busy = None
    if busy and account.last_busy is not None:
        after = account.last_busy - owner.claimed_boottime
        last_busy = owner.claimed_at + after if -SLACK <= after <= most else None
    return {
        "busy_seconds": busy,
        "observed_seconds": observed,
        "energy_joules": None if energy is None or energy > most * MOST_WATTS else energy,
        "memory_peak_bytes": None if peak is None or peak > (memory or MOST_MEMORY) else peak,
        "last_busy": last_busy,
        "foreign_seconds": None if foreign is None else min(foreign, held),
    }


def use_over_time(account: ClaimUsage) -> dict[str, Any] | None:
    """Return the use in each bucket, in thousandths of what was observed; None: nothing was.

    None as well for buckets that make no sense.
    """
    width = account.width
    if width is None or not FIRST_WIDTH <= width <= LONGEST_WIDTH:
        return None
    covered = [min(one, round(width * MILLI)) for one in account.covered[:BUCKETS]]
    pairs = zip(account.used, covered)
    use = [round(MILLI * min(used, most) / most) if most else None for used, most in pairs]
    return {"width": width, "use": use}


def parse_release_reason(how: str) -> tuple[str, str]:
    """Return in a word how a lock was released, and by what proof or whom."""
    for beginning, word in RELEASE_REASONS:
        if how.startswith(beginning):
            return word, one_line(how[len(beginning) :]) if beginning.endswith(" ") else ""
    return ("other" if how else "unknown"), one_line(how)


def round_to_milli(value: float | None) -> float | None:
    """Return a number to the millisecond or millijoule; what is no number is not known."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else round(value, 3)


def encode_history_record(record: Mapping[str, Any]) -> bytes:
    """Return the record as one line; a character that is no text is escaped."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
