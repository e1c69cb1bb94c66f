# SPDX-License-Identifier: Apache-2.0
"""What the exporter says of one claim, cut down to what can be true.

Warm. The exporter is an ordinary user, so each number is held against what root's own records
allow: a device cannot be observed for longer than it was held, nor work for longer than it was
observed. What cannot be true is not known.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gpulock.node import sample
from gpulock.node.sample import BUCKETS, MILLI, ClaimUsage, Sample
from gpulock.store.owner import Owner

SLACK: Final = 2.0  # seconds: a look begins before the claim and ends after the release
MOST_WATTS: Final = 20_000.0  # of one device: no board comes near to it
MOST_MEMORY: Final = 1 << 50  # bytes
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
    account: ClaimUsage | None, record: Owner, held: float, memory: int | None
) -> DeviceUsage:
    """Return what is believed of an account of a device held for `held` seconds.

    `memory` is the device's, in bytes, None where it is not known.
    """
    if account is None:
        return UNKNOWN_USAGE
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
    used = tuple([min(*both) for both in zip(account.used, covered, strict=False)])
    return width, used, covered[: len(used)]


def claim_time_to_epoch(boottime: float | None, record: Owner, most: float) -> float | None:
    """Return a moment of a claim by the clock of its record, None for one outside of it."""
    if boottime is None:
        return None
    after = boottime - record.claimed_boottime
    return record.claimed_at + after if -SLACK <= after <= most else None


class ExporterSamples:
    """The exporter's folder at one moment, of which `sample` is read when first asked for."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._sample: Sample | None = None
        self._looked = False

    def last(self) -> Sample | None:
        """Return the last sample, however old."""
        if not self._looked:
            self._sample = sample.load_sample_file(
                f"{self.folder}/{sample.SAMPLE}", sample.SAMPLE_LINE
            )
            self._looked = True
        return self._sample

    def read_claim_accounts(self, record: Owner) -> dict[str, ClaimUsage]:
        """Return what is left of a claim by lock id; else what stood in the last sample."""
        for found in (sample.read_finished_claim(self.folder, record.token), self.last()):
            if found is not None and found.boot_id == record.boot_id:
                accounts = found.tokens.get(record.token)
                if accounts:
                    return accounts
        return {}

    def read_standing_accounts(self, record: Owner) -> dict[str, ClaimUsage]:
        """Return what the last sample has of a claim, by lock id."""
        found = self.last()
        if found is None or found.boot_id != record.boot_id:
            return {}
        return found.tokens.get(record.token, {})

    def may_come(self, record: Owner, released_at: float, now: float) -> bool:
        """Return whether the exporter, alive, has yet to write what is left of a claim."""
        return self.may_come_to(record.token, record.boot_id, released_at, now)

    def may_come_to(self, token: str, boot_id: str, released_at: float, now: float) -> bool:
        """Return the same for a claim's token and boot; `released_at`, `now`: epoch seconds.

        It closes an account within a second or two of
        the release, or five where the driver does not answer; nobody waits for longer than
        LONGEST_WAIT.
        """
        if not -sample.AHEAD <= now - released_at <= LONGEST_WAIT:  # written to the millisecond
            return False
        found = self.last()
        if found is None or found.boot_id != boot_id or found.wall is None:
            return False
        if now - found.wall > sample.FRESH:
            return False
        if sample.read_finished_claim(self.folder, token) is not None:
            return False
        return token in found.tokens or found.wall < released_at + SLACK

    def memory(self, device: str) -> int | None:
        """Return the memory of a device in bytes, None where it is not told."""
        found = self.last()
        seen = found.devices.get(device) if found else None
        total = seen.memory_total if seen else None
        return total if total and total <= MOST_MEMORY else None
