# SPDX-License-Identifier: Apache-2.0
"""What each claim's devices did for it: one account a token and device. Pure.

A look counts for the claim that held the device when the look began: a claim that ends has its
last second in its account, and a claim that is seen for the first time starts at 0. Its use over
time is in a fixed number of buckets, whose width doubles when they are full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpulock.daemon.core.sample import BUCKETS, MILLI
from gpulock_exporter.state.device_totals import DeviceActivity

FIRST_WIDTH = 1.0  # seconds
LAST = 5.0  # seconds: a longer look at a claim that is over is not known to be its
PATIENCE = 5.0  # seconds that a claim that is over waits for a last look, when none comes
FOREIGN_LOOK = 60.0  # seconds: in a longer look processes come and go
Accounts = dict[str, "LedgerAccount"]


@dataclass
class Buckets:
    """Milliseconds at work (`used`) and observed (`covered`) in each bucket from `since` on.

    What is not covered is not known: it is neither work nor idleness.
    """

    since: float
    width: float = FIRST_WIDTH
    used: list[int] = field(default_factory=list[int])
    covered: list[int] = field(default_factory=list[int])

    def add(self, at: float, used: float, covered: float) -> None:
        """Add a look that ended `at` a time, spread over the buckets that it covers.

        What it covers before `since` counts to the first bucket.
        """
        end = max(0.0, at - self.since)
        while end > BUCKETS * self.width:
            self.width *= 2
            self.used = sum_neighbour_pairs(self.used)
            self.covered = sum_neighbour_pairs(self.covered)
        begin = max(0.0, end - covered)
        last = max(0, math.ceil(end / self.width) - 1)
        missing = last + 1 - len(self.used)
        if missing > 0:
            self.used += [0] * missing
            self.covered += [0] * missing
        first = min(last, int(begin / self.width))
        for place in range(first, last + 1):
            share = 1.0
            if first < last:
                left, right = max(begin, place * self.width), min(end, (place + 1) * self.width)
                share = (right - left) / (end - begin)
            self.used[place] += round(used * share * MILLI)
            self.covered[place] += round(covered * share * MILLI)


def sum_neighbour_pairs(values: Sequence[int]) -> list[int]:
    """Return the sum of each two neighbours; the last one may be alone."""
    return [sum(values[place : place + 2]) for place in range(0, len(values), 2)]


def restore_buckets(
    since: float, width: float | None, used: Sequence[int], covered: Sequence[int]
) -> Buckets:
    """Return the buckets of a file; none of lists that differ."""
    lists = (used, covered) if len(used) == len(covered) else ((), ())
    return Buckets(since, width or FIRST_WIDTH, *map(list, lists))


@dataclass(frozen=True)
class LedgerClaim:
    """Who holds a device: a token, and when it was claimed (CLOCK_BOOTTIME seconds)."""

    token: str
    since: float


@dataclass
class LedgerAccount:
    """What one device did for one claim; None is not known.

    `idle` are the observed seconds since it was last at work, `foreign` the seconds in which
    processes of others were seen beside it, `seen` is when it was last observed at all.
    """

    since: float
    until: float
    busy: float = 0.0
    observed: float = 0.0
    idle: float = 0.0
    foreign: float = 0.0
    last_busy: float | None = None
    energy: float | None = None
    memory_peak: int | None = None
    seen: float | None = None
    buckets: Buckets = field(default_factory=lambda: Buckets(0.0))

    @property
    def mean(self) -> float | None:
        """Return which part of what was observed it was at work, None where nothing was."""
        return self.busy / self.observed if self.observed else None

    def bill(self, activity: DeviceActivity, foreign: bool) -> None:
        """Add a look."""
        self.until = activity.at
        self.buckets.add(activity.at, activity.busy or 0.0, activity.observed)
        self.busy += activity.busy or 0.0
        self.observed += activity.observed
        self.idle = 0.0 if activity.worked else self.idle + activity.observed
        if activity.observed:
            self.seen = activity.at
        if activity.worked:
            self.last_busy = activity.at
        if activity.energy is not None and activity.energy_since >= min(self.since, activity.since):
            self.energy = (self.energy or 0.0) + activity.energy
        if foreign:
            self.foreign += min(activity.at - activity.since, FOREIGN_LOOK)

    def note_memory(self, activity: DeviceActivity) -> None:
        """Take the memory in use at the end of a look."""
        if activity.memory is not None:
            self.memory_peak = max(self.memory_peak or 0, activity.memory)


class Ledger:
    """The accounts of the claims that stand, by token and lock id."""

    def __init__(self, accounts: Mapping[str, Accounts] | None = None) -> None:
        self.accounts = dict(accounts or {})
        self._holders: dict[str, str] = {}  # as of the last look
        for token, of in self.accounts.items():  # in the order of their claims
            self._holders.update(dict.fromkeys(of, token))
        self._gone: dict[str, float] = {}

    def advance(
        self,
        held: Mapping[str, LedgerClaim | None] | None,
        activities: Mapping[str, DeviceActivity] | None,
        at: float,
        foreign: frozenset[str] = frozenset(),
    ) -> dict[str, Accounts]:
        """Bill a look at the devices; return the accounts of the claims that are over.

        `held` has who holds which device: None for a lock whose owner cannot be read, and None
        altogether where the locks cannot. `activities` is None where the driver did not answer: a
        claim that is over then waits a little for its last look.
        """
        for name, activity in (activities or {}).items():
            self._bill(name, activity, held, name in foreign)
        if held is None:
            return {}
        self._open(held, at)
        over = self._close(held, activities is not None, at)
        if activities is not None:
            self._holders = {name: claim.token for name, claim in held.items() if claim}
            for name, claim in held.items():
                # measured while it was held, and not before
                if claim and name in activities and claim.since <= activities[name].at:
                    self.accounts[claim.token][name].note_memory(activities[name])
        return over

    def of(self, device: str, token: str) -> LedgerAccount | None:
        """Return the account of a device for a claim."""
        return self.accounts.get(token, {}).get(device)

    def _bill(
        self,
        name: str,
        activity: DeviceActivity,
        held: Mapping[str, LedgerClaim | None] | None,
        foreign: bool,
    ) -> None:
        token = self._holders.get(name)
        account = self.of(name, token) if token else None
        if account is None:
            return
        now = held.get(name) if held else None
        still = now is not None and now.token == token
        if still or activity.at - activity.since <= LAST:
            account.bill(activity, foreign)

    def _open(self, held: Mapping[str, LedgerClaim | None], at: float) -> None:
        """Open an account for each device of a claim that has none."""
        for name, claim in held.items():
            if claim is None:
                continue
            self._gone.pop(claim.token, None)
            of = self.accounts.setdefault(claim.token, {})
            if name not in of:
                of[name] = LedgerAccount(claim.since, at, buckets=Buckets(claim.since))

    def _close(
        self, held: Mapping[str, LedgerClaim | None], answered: bool, at: float
    ) -> dict[str, Accounts]:
        """Take out the claims that are over; one behind an unreadable lock may not be."""
        standing = {claim.token for claim in held.values() if claim}
        unknown = {name for name, claim in held.items() if claim is None}
        over: dict[str, Accounts] = {}
        for token, of in list(self.accounts.items()):
            if token in standing or not unknown.isdisjoint(of):
                continue
            if answered or at - self._gone.setdefault(token, at) > PATIENCE:
                over[token] = self.accounts.pop(token)
                self._gone.pop(token, None)
        return over
