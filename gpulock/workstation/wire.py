# SPDX-License-Identifier: Apache-2.0
"""What `gpulock run` and gpulockd say to each other: one packet a message (SOCK_SEQPACKET).

A message is a version line and key=value lines. A request is believed in nothing but what its
sender may choose; who sends it is the kernel's word (workstation.peer). Pure, but for `socket`.
"""

from __future__ import annotations

import re
import socket
from typing import Any, NamedTuple, TypeVar

from gpulock.alloc.process_owner import NAMED, RUN
from gpulock.errors import one_line, quote_text
from gpulock.node.kinds import SHARE_KIND, parse_kind
from gpulock.store import kv

SOCKET = "socket"  # in LOCK_DIR
LARGEST = 1 << 14  # bytes of a packet: 128 bus ids are 2 KiB
CLAIM, RELEASE, CANCEL = "claim", "release", "cancel"
RESERVE, UNRESERVE = "reserve", "unreserve"
ACTS = (CLAIM, RELEASE, CANCEL, RESERVE, UNRESERVE)
READ, WAITING, GRANTED, RELEASED, REFUSED = "read", "waiting", "granted", "released", "refused"
MOST_DEVICES = 1024
LONGEST, LONGEST_NOTE, LONGEST_KIND = 1000, 80, 40  # characters of a text, and of others
# everybody reads them in the queue: bus id, instance, place of a share
DEVICE_ID = re.compile(r"[0-9a-f:]{4,14}\.[0-7](\.[a-z]{2,5}[0-9]{1,4}){0,3}")
FOR_EVER = float("inf")
PLURAL = ("share", "GPU")


class SocketRequest(NamedTuple):
    """What a client asks for. `pid` and `start` name the process that holds or is to hold.

    Of CANCEL `number` is that of a caller in the queue. RESERVE is from `begin` (epoch seconds) on
    for `seconds`, and `note` says what for.

    `number` devices, of `devices` (lock ids) alone where there are some; with `share` 1 a place
    on each is enough. `device_kind` as in gpulock.node.kinds. `wait` in seconds. `comment` as in
    an owner record. `preferred` devices are taken first where that is possible. `note` is what the
    owner writes beside the claim, whose end comes after `seconds`, 0: none was chosen.
    """

    act: str = ""
    pid: int = 0
    start: int = 0
    number: int = 0
    devices: tuple[str, ...] = ()
    wait: float = 0.0
    comment: str = ""
    share: int = 0
    device_kind: str = ""
    preferred: tuple[str, ...] = ()
    note: str = ""
    seconds: float = 0.0
    begin: float = 0.0


class SocketReply(NamedTuple):
    """What the daemon answers; after READ, which comes at once, and WAITING there is more to come.

    `places` of shares that were granted: how many their card has; `why`: what to know of the grant.
    `kind`, `why` and `do` of a refusal; `why`, `number` in the queue and `before` (callers in line)
    while waiting.
    """

    state: str = ""
    token: str = ""
    devices: tuple[str, ...] = ()
    before: int = 0
    kind: str = ""
    why: str = ""
    do: str = ""
    places: int = 0
    number: int = 0


FIRST_LINES: dict[type, str] = {
    SocketRequest: "gpulock-request 1",
    SocketReply: "gpulock-reply 1",
}
P = TypeVar("P", SocketRequest, SocketReply)


def parse_request(data: bytes) -> SocketRequest:
    """Return the request in a packet; raise ValueError for anything else."""
    request = decode_packet(SocketRequest(), data)
    count, devices, kind = request.number, request.devices, request.device_kind
    if not all(DEVICE_ID.fullmatch(one) for one in (*devices, *request.preferred)):
        raise ValueError("a device that is no id of one")
    if request.act not in ACTS:
        raise ValueError("no such act")
    if not (
        request.wait >= 0 and 0 <= request.seconds < FOR_EVER and 0 <= request.begin < FOR_EVER
    ):
        raise ValueError("no time")
    if len(devices) > MOST_DEVICES or len(set(devices)) != len(devices):
        raise ValueError("no set of devices")
    if request.act == RESERVE and len(devices) != 1:
        raise ValueError("not one device")
    if request.act == CLAIM and not (0 < count <= MOST_DEVICES and len(devices) in (0, count)):
        raise ValueError("no number of devices")
    if request.comment not in ("", RUN, NAMED):
        raise ValueError("no such comment")
    if kind:
        kind = parse_kind(kind[:LONGEST])
        if len(kind) > LONGEST_KIND or devices or request.share or kind == SHARE_KIND:
            raise ValueError("a long kind, or one and devices or shares")
    return request._replace(
        share=int(request.share > 0),
        device_kind=kind,
        preferred=request.preferred[:MOST_DEVICES],
        note=one_line(request.note[:LONGEST_NOTE]),
    )


def request_words(request: SocketRequest) -> str:
    """Return what a claim asks for, in a few words, and its note."""
    what = "share" if request.share else request.device_kind.partition(":")[2] or "GPU"
    note = f", {quote_text(request.note)}" if request.note else ""
    if request.devices:
        return f"{what} {' '.join(request.devices)}{note}"
    return f"{request.number} {what}{'s' if request.number > 1 and what in PLURAL else ''}{note}"


def parse_reply(data: bytes) -> SocketReply:
    """Return the reply in a packet; raise ValueError for anything else."""
    return decode_packet(SocketReply(), data)


def decode_packet(nothing: P, data: bytes) -> P:
    """Return what a packet says, in the place of what `nothing` has; raise ValueError."""
    pairs = kv.decode_pairs(data.decode("utf-8", "replace"), FIRST_LINES[type(nothing)])
    fields: dict[str, Any] = {}
    for key, default in nothing._asdict().items():
        if key in pairs and isinstance(default, tuple):
            fields[key] = tuple(filter(None, pairs[key].split(",")))
        elif key in pairs:
            fields[key] = type(default)(pairs[key])
    return nothing._replace(**fields)


def encode_packet(message: SocketRequest | SocketReply) -> bytes:
    """Return a message as one packet: a line for each field, no text over 1000 characters."""
    pairs = [
        (key, ",".join(value) if isinstance(value, tuple) else one_line(str(value))[:LONGEST])
        for key, value in message._asdict().items()
    ]
    first_line = FIRST_LINES[type(message)]
    return f"{first_line}\n{kv.encode_pairs(pairs)}".encode("utf-8", "replace")


def new_packet_socket(flags: int = 0) -> socket.socket:
    """Return a socket of the kind that both ends use."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | flags)
