# SPDX-License-Identifier: Apache-2.0
"""What the exporter saw of each device, as advice: fresh, or said in one line why it is not.

A site that runs no exporter has no folder for it, and hears nothing of it. What is not known is
None, never 0: a device that nobody observed is not idle.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from gpulock.daemon.core import sample
from gpulock.daemon.core.sample import ClaimUsage, DeviceSample, Sample
from gpulock.errors import one_line, shorten
from gpulock.store.locks import Lock
from gpulock.text.words import format_duration

NONE_RUNS = "no gpulock-exporter runs that writes"
LONGEST_FAULT = 200  # bytes that are shown of what it says
NOT_SHOWN = "utilisation and memory are not shown"


class SampleView(NamedTuple):
    """The last sample, None where it is not to be believed; `why` says so, empty for no exporter.

    `age` is how many seconds ago it was written, None where that is not known. `oldest` is the
    age in seconds at which a value is dropped (ten sample periods).
    """

    sample: Sample | None
    now: float
    oldest: float
    why: str = ""
    age: float | None = None

    def seen(self, device: str) -> DeviceSample | None:
        """Return what was seen of a device, None where that is old."""
        device_sample = self.sample.devices.get(device) if self.sample else None
        if (
            device_sample is None
            or device_sample.looked is None
            or self.now - device_sample.looked > self.oldest
        ):
            return None
        return device_sample

    def account(self, device: str, lock: Lock | None) -> ClaimUsage | None:
        """Return what a device did for the claim that holds it."""
        if self.sample is None or lock is None or lock.owner is None:
            return None
        return self.sample.tokens.get(lock.owner.token, {}).get(device)

    def idle(self, device: str, lock: Lock | None) -> float | None:
        """Return the observed seconds since a claim's device was at work; a reserve is to rest."""
        if self.sample is None or lock is None or lock.owner is None or lock.owner.is_reserve():
            return None
        return self.sample.idle(device, lock.owner.token, self.oldest)

    def idle_ids(self, held: dict[str, Lock], seconds: float) -> frozenset[str]:
        """Return the locked devices that are idle for at least so long."""
        idle_times = [(name, self.idle(name, lock)) for name, lock in held.items()]
        return frozenset(
            [name for name, idle in idle_times if idle is not None and idle >= seconds]
        )

    def foreign_ids(self) -> frozenset[str]:
        """Return the devices with processes on them that are of no claim and no service."""
        names = list(self.sample.devices) if self.sample else []
        return frozenset([name for name in names if count_seen_foreign(self.seen(name))])

    def last_busy(self, device: str, lock: Lock | None) -> float | None:
        """Return the seconds since a device was at work; of a held one, for its claim."""
        seen = self.account(device, lock) if lock else self.seen(device)
        return max(0.0, self.now - seen.last_busy) if seen and seen.last_busy is not None else None

    def mean(self, device: str, lock: Lock | None) -> float | None:
        """Return the share of its time in which a device worked for its claim."""
        account = self.account(device, lock)
        if account is None or account.busy is None or not account.observed:
            return None
        return min(1.0, account.busy / account.observed)


def count_seen_foreign(seen: DeviceSample | None) -> int | None:
    """Return how many foreign processes are on a device; none to be seen is not none at all."""
    if seen is None or (seen.unseen and not seen.foreign):
        return None
    return seen.foreign


def read_sample_view(folder: str, now: float, boot_id: str, oldest: float) -> SampleView:
    """Return what the exporter that writes `folder` saw; never raises. `now` is CLOCK_BOOTTIME."""
    if not os.path.isdir(folder):
        return SampleView(None, now, oldest)
    path = f"{folder}/{sample.SAMPLE}"
    latest = sample.load_sample_file(path, sample.SAMPLE_LINE)
    age = None
    if latest is None:
        there = os.path.lexists(path)
        why = f"{path} cannot be read" if there else f"{NONE_RUNS} {folder}"
    elif latest.boot_id != boot_id or latest.boottime is None:
        why = f"{NONE_RUNS} {folder} in this boot"
    elif now - latest.boottime < -sample.AHEAD:
        why = f"the sample in {folder} is dated in the future"
    else:
        age = max(0.0, now - latest.boottime)
        why = why_not_shown(latest, folder, now, age, oldest)
    return SampleView(None if why else latest, now, oldest, why and f"{why}: {NOT_SHOWN}", age)


def why_not_shown(latest: Sample, folder: str, now: float, age: float, oldest: float) -> str:
    """Return why a sample of this boot is too old, or nothing."""
    if age > oldest:
        why = f"gpulock-exporter has written nothing to {folder} for {format_duration(age)}"
        return f"{why} (journalctl -u gpulock-exporter)"
    if latest.looked is not None and now - latest.looked <= oldest:
        return ""
    since = "yet" if latest.looked is None else f"for {format_duration(now - latest.looked)}"
    fault = f" ({shorten(one_line(latest.fault), LONGEST_FAULT)})" if latest.fault else ""
    return f"gpulock-exporter has had no answer from the driver {since}{fault}"
