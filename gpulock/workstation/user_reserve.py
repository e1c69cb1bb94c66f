# SPDX-License-Identifier: Apache-2.0
"""Reserve a GPU for an ordinary user, from a time to another, as far as RESERVE_MAX goes.

What lies within a day of it counts with it, also what is over: so nobody keeps a GPU from all
others by one after another.
"""

from __future__ import annotations

from gpulock.errors import BUSY, INVALID_REQUEST, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import lock_ids_overlap
from gpulock.store.reservations import Reservation, read_reservations, write_reservations
from gpulock.workstation.wire import SocketRequest

MINUTE = 60.0
COUNTED = 86400.0  # seconds before and after one, within which others count with it
AHEAD = 366 * 86400.0  # seconds: the latest begin of one
MOST_COUNTED = (
    16  # of a user, those that count: a second of each GPU every hour would stop all longer ones
)


def reserve_for_user(node: Node, request: SocketRequest, who: tuple[int, str], now: float) -> None:
    """Reserve a device for the user (uid, name); `now` is epoch seconds. Raises Refusal."""
    uid, user = who
    (device,) = request.devices
    longest = node.settings.reserve_max
    if device not in [one.id for one in node.devices()]:
        raise Refusal(INVALID_REQUEST, f"no device {device} here", "see gpulock status")
    if request.begin > now + AHEAD:
        raise Refusal(INVALID_REQUEST, "that time is more than a year away", "name an earlier one")
    begin = max(now, request.begin)
    end = request.begin + request.seconds
    wanted = Reservation(device, uid, (begin, end), user, request.note)
    if wanted.end <= begin:
        raise Refusal(INVALID_REQUEST, "that time is over", "name a later one with --to")
    every = [one for one in read_reservations(node.settings.state_dir) if one.end > now - COUNTED]
    for one in every:
        if lock_ids_overlap(one.device, device) and one.begin < wanted.end and begin < one.end:
            own = f"gpulock unreserve {device} first" if one.uid == uid else "reserve another"
            raise Refusal(BUSY, f"{device} is {one.describe()}", f"{own}, or another time")
    mine = [one for one in every if one.uid == uid]
    near = [o for o in mine if o.end > begin - COUNTED and o.begin < wanted.end + COUNTED]
    left = longest - sum(one.end - one.begin for one in near)
    if wanted.end - begin > left or len(mine) >= MOST_COUNTED:
        minutes = f"{max(0.0, left) // MINUTE:.0f} of {longest / MINUTE:.0f} minutes a day"
        asked = f"{(wanted.end - begin) / MINUTE:.0f} minutes are asked for"  # tomorrow, by mistake
        why = (
            f"{asked}, {minutes} are left to you then (RESERVE_MAX; what is over counts for a day)"
        )
        if len(mine) >= MOST_COUNTED:
            why = f"{MOST_COUNTED} reservations of yours count already, one that is over for a day"
        do = "ask for less, or gpulock unreserve what you do not need"
        if not longest:
            why, do = "users reserve nothing here", "ask for RESERVE_MAX on this node"
        raise Refusal(INVALID_REQUEST, why, do)
    write_reservations(node.settings.state_dir, [*every, wanted])


def end_reservations(
    node: Node, request: SocketRequest, uid: int, now: float
) -> tuple[tuple[str, ...], list[str]]:
    """End what the user, or for root anybody, has reserved of devices; return them, and what ended.

    Raises Refusal.
    """
    every = read_reservations(node.settings.state_dir)
    mine = [one for one in every if one.device in request.devices and uid in (0, one.uid)]
    ended = [one for one in mine if one.end > now]
    if not ended:
        what = f"{' '.join(request.devices)} is not reserved for you"
        raise Refusal(INVALID_REQUEST, what, "see gpulock status")
    sentences = [one.describe() for one in ended]
    for one in ended:
        one.end = now  # what was used of it counts
    write_reservations(node.settings.state_dir, [one for one in every if one.end > one.begin])
    return tuple(one.device for one in ended), sentences
