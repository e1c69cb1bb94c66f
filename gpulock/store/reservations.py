# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/reservations: the GPUs that users have for themselves, from a time to another.

Hot. Written by gpulockd alone; no lock and no hook knows of it. In its time nobody else is granted
such a GPU by gpulockd, and who holds it already keeps it.
"""

import time

from gpulock.errors import quote_text
from gpulock.store import atomic, kv

RESERVED = "reservations"
VERSION_LINE = "gpulock-reservations 1"
LIMIT = 1 << 20  # bytes
NUMBERS = 3  # of a reservation, behind its device
LATEST = 1e11  # epoch seconds: localtime(3) has a year for all before


class Reservation:
    """One device, whose it is, from when to when (epoch seconds), and what for."""

    def __init__(
        self, device: str, uid: int, times: tuple[float, float], user: str, why: str
    ) -> None:
        self.device = device
        self.uid = uid
        self.begin, self.end = times
        self.user = user
        self.why = why

    def describe(self, user: str = "") -> str:
        """Return `reserved for alice from 11-29 14:00 until 11-29 18:00: "thesis"`."""
        times = [time.strftime("%m-%d %H:%M", time.localtime(at)) for at in (self.begin, self.end)]
        who = user or self.user
        return f"reserved for {who} from {' until '.join(times)}: {quote_text(self.why)}"


def read_reservations(state_dir: str) -> list[Reservation]:
    """Return all, also those that are over; none where the file is no good."""
    reservations: list[Reservation] = []
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{state_dir}/{RESERVED}", LIMIT), VERSION_LINE)
        for key, value in pairs.items():
            uid, begin, end, texts = value.split(" ", NUMBERS)
            user, _, why = texts.partition("; ")
            device, times = key.partition(" ")[2], (float(begin), float(end))
            if not 0 <= times[0] <= times[1] <= LATEST:
                raise ValueError("no times")
            reservations.append(Reservation(device, int(uid), times, user, why))
    except (OSError, ValueError):
        return []
    return reservations


def write_reservations(state_dir: str, every: list[Reservation]) -> None:
    """Replace the file, durably; raise OSError or kv.MalformedError."""
    pairs = [
        (f"{number} {one.device}", f"{one.uid} {one.begin} {one.end} {one.user}; {one.why}")
        for number, one in enumerate(every)
    ]
    data = f"{VERSION_LINE}\n{kv.encode_pairs(pairs)}".encode("utf-8", "replace")
    atomic.replace_file(f"{state_dir}/{RESERVED}", data, durable=True)


def find_reserved_devices(
    every: list[Reservation], now: float, uid: int = -1, until: float = 0.0
) -> dict[str, str]:
    """Return for whom each device is reserved at `now`, by id, where that is not user `uid`.

    Also for whom next where that begins before `until`.
    """
    others = [one for one in every if one.uid != uid and now < one.end]
    others.sort(key=lambda one: -one.begin)
    return {one.device: one.describe() for one in others if one.begin <= max(now, until)}


def find_own_devices(every: list[Reservation], now: float, uid: int) -> tuple[str, ...]:
    """Return the devices that user `uid` has reserved at `now`."""
    return tuple(one.device for one in every if one.begin <= now < one.end and one.uid == uid)
