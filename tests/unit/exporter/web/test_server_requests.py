# SPDX-License-Identifier: Apache-2.0
"""What is no plain GET or HEAD is refused, once, and ends the connection."""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest
from gpulock_exporter.web.http import HttpRequest, HttpResponse

from tests.exporter.inprocess import Running, greet, running
from tests.exporter.wire import SOUND, dial, exchange
from tests.support.wait import let_work

HOST = b"Host: node\r\n"
SECOND = b"GET /smuggled HTTP/1.1\r\nHost: node\r\n\r\n"

UNSOUND = {
    "length and chunked": b"GET / HTTP/1.1\r\n%sContent-Length: 4\r\nTransfer-Encoding: chunked"
    b"\r\n\r\n0\r\n\r\n" % HOST,
    "chunked": b"GET / HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % HOST,
    "hidden chunked": b"GET / HTTP/1.1\r\n%sTransfer-Encoding: xchunked\r\n\r\n" % HOST,
    "chunked behind a tab": b"GET / HTTP/1.1\r\n%sTransfer-Encoding:\tchunked\r\n\r\n" % HOST,
    "a body": b"GET / HTTP/1.1\r\n%sContent-Length: 5\r\n\r\nhello" % HOST,
    "two lengths": b"GET / HTTP/1.1\r\n%sContent-Length: 0\r\nContent-Length: 9\r\n\r\n" % HOST,
    "a signed length": b"GET / HTTP/1.1\r\n%sContent-Length: +0\r\n\r\n" % HOST,
    "a bare line feed": b"GET / HTTP/1.1\r\nHost: node\nX: y\r\n\r\n",
    "bare line feeds alone": b"GET / HTTP/1.1\nHost: node\n\n",
    "a bare carriage return": b"GET / HTTP/1.1\r\nHost: node\rX: y\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\n%sX: a\r\n b\r\n\r\n" % HOST,
    "NUL in a header": b"GET / HTTP/1.1\r\n%sX: a\0b\r\n\r\n" % HOST,
    "NUL in the target": b"GET /\0 HTTP/1.1\r\n%s\r\n" % HOST,
    "a blank before the colon": b"GET / HTTP/1.1\r\n%sX : y\r\n\r\n" % HOST,
    "a header without a name": b"GET / HTTP/1.1\r\n%s: y\r\n\r\n" % HOST,
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\n%s%s\r\n" % (HOST, HOST),
    "an empty line first": b"\r\nGET / HTTP/1.1\r\n%s\r\n" % HOST,
    "a huge method": b"G" * 9000 + b" / HTTP/1.1\r\n%s\r\n" % HOST,
    "no method": b" / HTTP/1.1\r\n%s\r\n" % HOST,
    "two blanks": b"GET  / HTTP/1.1\r\n%s\r\n" % HOST,
    "no version": b"GET /\r\n%s\r\n" % HOST,
    "an absolute target": b"GET http://other/metrics HTTP/1.1\r\n%s\r\n" % HOST,
    "a target of another": b"GET //other/ HTTP/1.1\r\n%s\r\n" % HOST,
    "a traversal": b"GET /../../etc/passwd HTTP/1.1\r\n%s\r\n" % HOST,
    "an encoded traversal": b"GET /%%2e%%2e/etc/passwd HTTP/1.1\r\n%s\r\n" % HOST,
    "a backslash": b"GET /..\\etc HTTP/1.1\r\n%s\r\n" % HOST,
    "a fragment": b"GET /#x HTTP/1.1\r\n%s\r\n" % HOST,
    "a byte that is not ASCII": b"GET /\xff HTTP/1.1\r\n%s\r\n" % HOST,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.fixture(scope="module")
def seen() -> list[HttpRequest]:
    return []


@pytest.fixture(autouse=True)
def forget(seen: list[HttpRequest]) -> None:
    seen.clear()


@pytest.fixture(scope="module")
def server(seen: list[HttpRequest]) -> Generator[Running]:
    def handler(request: HttpRequest) -> HttpResponse:
        seen.append(request)
        return greet(request)

    with running(handler) as one:
        yield one


@pytest.mark.parametrize("data", UNSOUND.values(), ids=UNSOUND)
def test_an_unsound_request_is_refused_and_the_connection_closed(
    data: bytes, server: Running, seen: list[HttpRequest]
) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, data + SECOND)
    assert closed
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 505 "))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"Connection: close\r\n" in answer
    assert seen == []


def test_a_version_that_is_not_spoken_is_named(server: Running) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, b"GET / HTTP/3.0\r\nHost: node\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert closed


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT"])
def test_another_method_is_refused(method: bytes, server: Running) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, SOUND.replace(b"GET", method))
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nAllow: GET, HEAD\r\n" in answer
    assert closed


def test_a_header_over_the_limit_is_refused_with_431(server: Running) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, SOUND[:-2] + b"X: " + b"a" * 20_000)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert closed


def test_the_reason_reaches_a_client_that_is_still_sending(server: Running) -> None:
    with dial(server.port) as one:
        for _ in range(50):
            one.sendall(b"X" * 1000)
            let_work(0.002)
        answer, closed = exchange(one, b"")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert closed


def test_too_many_headers_are_refused_with_431(server: Running) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, SOUND[:-2] + b"X: y\r\n" * 200 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert closed


def test_a_request_may_come_byte_by_byte(server: Running) -> None:
    with dial(server.port) as one:
        for byte in SOUND[:-1]:
            one.sendall(bytes([byte]))
        answer, _ = exchange(one, SOUND[-1:], 0.3)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    paths = [b"/one", b"/two", b"/three"]
    with dial(server.port) as one:
        data = b"".join(SOUND.replace(b"/metrics", path) for path in paths)
        answer, closed = exchange(one, data, 0.3)
    assert re.findall(rb"\r\n\r\nGET (/[a-z]+)\n", answer) == paths
    assert not closed


def test_what_is_pipelined_behind_an_unsound_request_is_not_answered(
    server: Running, seen: list[HttpRequest]
) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, SOUND + UNSOUND["a body"] + SECOND)
    assert [request.path for request in seen] == ["/metrics"]
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert answer.count(b"HTTP/1.1 400 ") == 1
    assert closed


def test_an_old_client_is_answered_once(server: Running) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, b"GET / HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert closed


def test_a_client_that_asks_for_the_end_gets_it(server: Running) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, SOUND[:-2] + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert closed


def test_an_upgrade_is_answered_in_the_protocol_that_is_spoken(server: Running) -> None:
    with dial(server.port) as one:
        upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
        answer, _ = exchange(one, SOUND[:-2] + upgrade, 0.3)
    assert answer.startswith(b"HTTP/1.1 200 ")
