# SPDX-License-Identifier: Apache-2.0
"""What client and daemon say: read back as written, and nothing else is a request."""

from __future__ import annotations

import pytest

from gpulock.workstation.wire import (
    FIRST_LINES,
    LARGEST,
    WAITING,
    SocketReply,
    SocketRequest,
    encode_packet,
    parse_reply,
    parse_request,
)


def asked(*lines: str) -> bytes:
    return "\n".join([FIRST_LINES[SocketRequest], *lines]).encode() + b"\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"GET / HTTP/1.1\r\n",
        asked(),
        asked("act=reap"),
        asked("act=claim", "pid=1", "start=1"),
        asked("act=claim", "number=0"),
        asked("act=claim", "number=-1"),
        asked("act=claim", "number=99999"),
        asked("act=claim", "number=1", "wait=-1"),
        asked("act=claim", "number=1", "wait=nan"),
        asked("act=claim", "number=1", "wait=soon"),
        asked("act=claim", "number=1", "comment=root's own"),
        asked("act=claim", "number=2", "devices=a,a"),
        asked("act=claim", "number=2", "devices=a"),
        asked("act=claim", "number=1", "devices=\u00e4"),
        asked("act=claim", "number=1", "preferred=\u00e4"),
        asked("act=claim", "number=1", "device_kind=model:\u00e4"),
        asked("act=claim", "act=claim", "number=1"),
        asked("act=reserve", "seconds=60"),
        asked("act=reserve", "seconds=60", "devices=a,b"),
        asked("act=claim", "number=1", "device_kind=a100"),
        asked("act=claim", "number=1", "device_kind=share"),
        asked("act=claim", "number=1", "device_kind=any", "share=1"),
        asked("act=claim", "number=1", "device_kind=any", "devices=a"),
    ],
)
def test_anything_else_is_no_request(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_request(data)


@pytest.mark.parametrize(
    ("note", "read"), [("für Diss", "für Diss"), ("a\x1bb\u2028", "a?b?"), ("ü" * 81, "ü" * 80)]
)
def test_a_comment_is_text_in_any_language_and_of_one_line(note: str, read: str) -> None:
    assert parse_request(asked("act=claim", "number=1", f"note={note}")).note == read


def test_a_reply_is_one_message_whatever_it_says() -> None:
    told = SocketReply(WAITING, before=3, why="a\nstate=granted\x1b\0", do="x" * LARGEST)
    data = encode_packet(told)
    found = parse_reply(data)
    assert (len(data) < LARGEST, found.state, found.before) == (True, WAITING, 3)
    assert found.why.startswith("a") and found.why.isprintable()
