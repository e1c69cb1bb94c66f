# SPDX-License-Identifier: Apache-2.0
"""A connection carries one GET or HEAD: nothing else is answered, and nothing behind it.

And the encoding that a client takes, and how often a sample is written.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Generator

import pytest
from gpulock_exporter.web.http import HttpRequest, HttpResponse, SampleBody, takes_gzip
from gpulock_exporter.web.server import ServerLimits

from tests.exporter.servers import SOUND, Running, dial, exchange, greet, running
from tests.support.wait import let_work, wait_until

HOST = b"Host: node\r\n"
SECOND = b"GET /smuggled HTTP/1.1\r\nHost: node\r\n\r\n"

HOSTILE = {
    "a body": b"POST / HTTP/1.1\r\n%sContent-Length: 5\r\n\r\nhello" % HOST,
    "chunked": b"GET / HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % HOST,
    "length and chunked": b"GET / HTTP/1.1\r\n%sContent-Length: 4\r\nTransfer-Encoding: chunked"
    b"\r\n\r\n0\r\n\r\n" % HOST,
    "kept alive": b"GET / HTTP/1.1\r\n%sConnection: keep-alive\r\n\r\n" % HOST,
    "kept alive as of old": b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: node\n\n",
    "a bare carriage return": b"GET / HTTP/1.1\r\nHost: node\rX: y\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\n%sX: a\r\n b\r\n\r\n" % HOST,
    "NUL": b"GET /\0 HTTP/1.1\r\n%sX: a\0b\r\n\r\n" % HOST,
    "a header without a name": b"GET / HTTP/1.1\r\n%s: y\r\n\r\n" % HOST,
    "an empty line first": b"\r\nGET / HTTP/1.1\r\n%s\r\n" % HOST,
    "no version": b"GET /\r\n%s\r\n" % HOST,
    "a huge method": b"G" * 9000 + b" / HTTP/1.1\r\n%s\r\n" % HOST,
    "a byte that is not ASCII": b"GET /\xff HTTP/1.1\r\n%s\r\n" % HOST,
    "100-continue": b"GET / HTTP/1.1\r\n%sExpect: 100-continue\r\n\r\n" % HOST,
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


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_connection_gets_one_answer_at_most_and_what_follows_is_never_read(
    data: bytes, server: Running, seen: list[HttpRequest]
) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, data + SECOND)
    assert closed
    assert answer.count(b"HTTP/1.") == answer.startswith(b"HTTP/1.0 ")
    assert b"smuggled" not in answer
    assert len(seen) <= 1
    assert not any("smuggled" in one.path for one in seen)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (SOUND.replace(b"GET", b"POST"), b"501"),
        (SOUND.replace(b"GET", b"CONNECT"), b"501"),
        (SOUND.replace(b"HTTP/1.1", b"HTTP/3.0"), b"505"),
        (SOUND.replace(b"HTTP/1.1", b"1.1"), b"400"),
        (b"GET  HTTP/1.1 /\r\n\r\n", b"400"),
        (SOUND[:-2] + b"X: y\r\n" * 200 + b"\r\n", b"431"),
        (SOUND[:-2] + b"X: " + b"a" * 20_000, b"431"),
    ],
)
def test_what_is_no_plain_get_is_refused_and_closed(
    data: bytes, status: bytes, server: Running, seen: list[HttpRequest]
) -> None:
    with dial(server.port) as one:
        answer, closed = exchange(one, data)
    assert answer.startswith(b"HTTP/1.0 " + status)
    assert (closed, seen) == (True, [])


def test_the_reason_reaches_a_client_that_is_still_sending(server: Running) -> None:
    with dial(server.port) as one:
        for _ in range(50):
            one.sendall(b"X" * 1000)
            let_work(0.002)
        answer, closed = exchange(one, b"")
    assert answer.startswith(b"HTTP/1.0 431 ")
    assert closed


def test_a_request_may_come_byte_by_byte(server: Running) -> None:
    with dial(server.port) as one:
        for byte in SOUND[:-1]:
            one.sendall(bytes([byte]))
        answer, _ = exchange(one, SOUND[-1:])
    assert answer.startswith(b"HTTP/1.0 200 ")


ZIPPED = HttpRequest("/metrics", headers={"accept-encoding": "gzip"})


@pytest.mark.parametrize(
    ("accepted", "taken"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP;q=0.1", True),
        ("deflate, gzip; q=1.0, *;q=0.5", True),
        ("gzip;q=0, *", False),
        ("gzip;q=0.000", False),
        ("br, zstd, xgzip", False),
        (",;,=;q=", False),
    ],
)
def test_gzip_is_used_where_it_is_taken(accepted: str, taken: bool) -> None:
    assert takes_gzip(accepted) is taken


def test_each_body_is_made_once_however_many_ask_at_once() -> None:
    written: list[int] = []

    def render() -> bytes:
        let_work(0.05)
        written.append(1)
        return b"gpulock_nvml_up 1\n" * 100

    sample = SampleBody(render)
    answers: list[HttpResponse] = []
    threads = [
        threading.Thread(target=lambda: answers.append(sample.response(ZIPPED))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(answer.body) for answer in answers}) == 1
    assert gzip.decompress(answers[0].body) == sample.response(HttpRequest("/metrics")).body
    assert written == [1]


def test_a_stop_answers_a_connection_whose_request_is_still_to_come() -> None:
    limits = ServerLimits(new_seconds=60, stop_seconds=60)
    with running(limits=limits) as one, dial(one.port) as client:
        client.sendall(SOUND[:20])
        wait_until(lambda: one.server.connections == 1, why="it to be accepted")
        stopping = threading.Thread(target=one.server.stop)
        stopping.start()
        wait_until(lambda: not one.server.is_serving, why="the stop")
        assert exchange(client, SOUND[20:])[0].startswith(b"HTTP/1.0 200 ")
        stopping.join()
