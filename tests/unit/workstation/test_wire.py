# SPDX-License-Identifier: Apache-2.0
"""What client and daemon say: read back as written, and nothing else is a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.workstation.wire import (
    CLAIM,
    FIRST_LINES,
    FOR_EVER,
    LARGEST,
    RELEASE,
    WAITING,
    SocketReply,
    SocketRequest,
    encode_packet,
    parse_reply,
    parse_request,
)
from tests.support.trees import bus


@pytest.mark.parametrize(
    "request_",
    [
        SocketRequest(CLAIM, 4711, 99, 2),
        SocketRequest(CLAIM, 4711, 99, 2, (bus(0), bus(1)), 3600.0, "run"),
        SocketRequest(CLAIM, 1, 2, 128, tuple(bus(n) for n in range(128)), FOR_EVER),
        SocketRequest(CLAIM, 4711, 99, 2, device_kind="model:a100*"),
        SocketRequest(RELEASE, 4711, 99),
        SocketRequest(RELEASE, 4711, 0, devices=("0000:3b:00.0.gi1.ci0",)),
    ],
)
def test_a_request_is_read_as_it_was_written(request_: SocketRequest) -> None:
    data = encode_packet(request_)
    assert len(data) <= LARGEST
    assert parse_request(data) == request_


@given(st.text(), st.text(), st.integers(0, 10**6))
def test_a_reply_is_one_message_whatever_it_says(why: str, do: str, before: int) -> None:
    found = parse_reply(encode_packet(SocketReply(WAITING, before=before, why=why, do=do)))
    assert (found.state, found.before) == (WAITING, before)
    assert "\n" not in found.why


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
        asked("act=claim", "act=claim", "number=1"),
        asked("act=claim", "number=1", "device_kind=a100"),
        asked("act=claim", "number=1", "device_kind=share"),
        asked("act=claim", "number=1", "device_kind=any", "share=1"),
        asked("act=claim", "number=1", "device_kind=any", "devices=a"),
    ],
)
def test_anything_else_is_no_request(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_request(data)


@given(st.binary(max_size=300))
def test_garbage_is_a_value_error_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_request(data)
