# SPDX-License-Identifier: Apache-2.0
"""What `gpulock run` and gpulockd say to each other: one packet a message (SOCK_SEQPACKET).

A message is a version line and key=value lines. A request is believed in nothing but what its
sender may choose; who sends it is the kernel's word (workstation.peer). Pure, but for `socket`.
"""

from __future__ import annotations

import socket
from typing import NamedTuple, cast

from gpulock.errors import one_line
from gpulock.node.kinds import SHARE_KIND, parse_kind
from gpulock.store import kv

SOCKET = "socket"  # in LOCK_DIR
REQUEST_LINE, REPLY_LINE = "gpulock-request 1", "gpulock-reply 1"
LARGEST = 1 << 14  # bytes of a packet: 128 bus ids are 2 KiB
CLAIM, RELEASE, CANCEL = "claim", "release", "cancel"
RESERVE, UNRESERVE = "reserve", "unreserve"
READ, WAITING, GRANTED, RELEASED, REFUSED = "read", "waiting", "granted", "released", "refused"
MOST_DEVICES = 1024
LONGEST, LONGEST_NOTE = 1000, 80  # characters of a text, and of a note
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

    act: str
    pid: int
    start: int
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

    `places` of shares that were granted: how many their card has. `kind`, `why` and `do` of a
    refusal; `why` and `before` (callers in line) while waiting.
    """

    state: str
    token: str = ""
    devices: tuple[str, ...] = ()
    before: int = 0
    kind: str = ""
    why: str = ""
    do: str = ""
    places: int = 0


def encode_request(request: SocketRequest) -> bytes:
    """Return the packet of a request."""
    return encode_packet(REQUEST_LINE, request._asdict())


def parse_request(data: bytes) -> SocketRequest:
    """Return the request in a packet; raise ValueError for anything else."""
    pairs = kv.decode_pairs(data.decode("ascii"), REQUEST_LINE)
    act, wait = pairs.get("act", ""), float(pairs.get("wait", "0"))
    if act not in (CLAIM, RELEASE, CANCEL, RESERVE, UNRESERVE) or not wait >= 0:
        raise ValueError("no such act")
    names = pairs.get("devices", "")
    devices = tuple(names.split(",")) if names else ()
    count = parse_whole_number(pairs, "number")
    if len(devices) > MOST_DEVICES or len(set(devices)) != len(devices):
        raise ValueError("no set of devices")
    if act == RESERVE and len(devices) != 1:
        raise ValueError("not one device")
    if act == CLAIM and not 0 < count <= MOST_DEVICES:
        raise ValueError("no number of devices")
    if act == CLAIM and devices and len(devices) != count:
        raise ValueError("number and devices do not fit")
    comment = pairs.get("comment", "")
    if comment not in ("", "run"):
        raise ValueError("no such comment")
    pid, start = parse_whole_number(pairs, "pid"), parse_whole_number(pairs, "start")
    preferred = tuple(filter(None, pairs.get("preferred", "").split(",")))[:MOST_DEVICES]
    note, seconds = pairs.get("note", "")[:LONGEST_NOTE], float(pairs.get("seconds", "0"))
    begin = float(pairs.get("begin", "0"))
    if not (0 <= seconds < FOR_EVER and 0 <= begin < FOR_EVER):
        raise ValueError("no duration")
    share = int(parse_whole_number(pairs, "share") > 0)
    kind = pairs.get("device_kind", "")
    if kind:
        kind = parse_kind(kind[:LONGEST])
        if devices or share or kind == SHARE_KIND:
            raise ValueError("a kind, and devices or shares")
    what = (act, pid, start, count, devices, wait, comment, share, kind)
    return SocketRequest(*what, preferred, one_line(note), seconds, begin)


def request_words(request: SocketRequest | None) -> str:
    """Return what a claim asks for, in a few words."""
    if request is None:
        return ""
    what = "share" if request.share else request.device_kind.partition(":")[2] or "GPU"
    if request.devices:
        return f"{what} {' '.join(request.devices)}"
    return f"{request.number} {what}{'s' if request.number > 1 and what in PLURAL else ''}"


def encode_reply(reply: SocketReply) -> bytes:
    """Return the packet of a reply."""
    return encode_packet(REPLY_LINE, reply._asdict())


def parse_reply(data: bytes) -> SocketReply:
    """Return the reply in a packet; raise ValueError for anything else."""
    pairs = kv.decode_pairs(data.decode("utf-8", "replace"), REPLY_LINE)
    names = pairs.get("devices", "")
    devices, before = tuple(names.split(",")) if names else (), parse_whole_number(pairs, "before")
    texts = {key: pairs.get(key, "") for key in ("state", "token", "kind", "why", "do")}
    places = parse_whole_number(pairs, "places")
    return SocketReply(devices=devices, before=before, places=places, **texts)


def encode_packet(first_line: str, fields: dict[str, object]) -> bytes:
    """Return one packet: a line for each field, no text longer than 1000 characters."""
    pairs = [
        (
            key,
            ",".join(cast("tuple[str, ...]", value))
            if isinstance(value, tuple)
            else one_line(str(value))[:LONGEST],
        )
        for key, value in fields.items()
    ]
    return f"{first_line}\n{kv.encode_pairs(pairs)}".encode("utf-8", "replace")


def parse_whole_number(pairs: dict[str, str], key: str) -> int:
    """Return a whole number from 0; raise ValueError."""
    text = pairs.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):  # noqa: PLR2004 (64 bits)
        raise ValueError(f"{key} is no number")
    return int(text)


def new_packet_socket(flags: int = 0) -> socket.socket:
    """Return a socket of the kind that both ends use."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | flags)
