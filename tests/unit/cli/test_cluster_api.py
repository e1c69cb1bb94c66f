# SPDX-License-Identifier: Apache-2.0
"""What is said of a Prometheus server that is missing, broken, or something else."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from gpulock.cli.cluster.prometheus_api import query_prometheus
from gpulock.cli.session import CommandRefusedError
from tests.support.cli_site import Site
from tests.support.ports import ReservedPort
from tests.support.prometheus_server import Act, Prometheus, send

QUERY = "up"
NO_SERIES = b'{"status": "success", "data": {"resultType": "vector", "result": [{"metric": 7}]}}'
HUGE = b'{"status": "success", "data": {"result": [{"metric": {}, "value": [1, 1%0400d]}]}}' % 0


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    with Prometheus() as made:
        made.samples[QUERY] = [({"__name__": "up", "instance": "a:1"}, 1)]
        yield made


def refused(url: str, seconds: float = 10.0, limit: int = 1 << 20) -> str:
    with pytest.raises(CommandRefusedError) as caught:
        query_prometheus(url, [QUERY], seconds, limit)
    return caught.value.message


def sends(raw: bytes) -> Act:
    def act(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(raw)
        handler.close_connection = True

    return act


def answers(code: int, body: bytes, kind: str = "application/json", **headers: str) -> Act:
    return lambda handler: send(handler, code, body, kind, **headers)


def test_an_answer_is_its_series(prometheus: Prometheus) -> None:
    ((one,),) = query_prometheus(prometheus.url + "/", [QUERY])
    assert (one.name, one.labels, one.value) == ("up", {"instance": "a:1"}, 1.0)
    assert prometheus.asked[0][0].startswith("/api/v1/query?query=up&timeout=")


@pytest.mark.real_time
def test_a_large_answer_in_small_parts_is_read_as_fast_as_it_comes(prometheus: Prometheus) -> None:
    def send_chunks(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        handler.wfile.write(b"1000\r\n%04096d\r\n" % 0 * 5000 + b"0\r\n\r\n")

    prometheus.act = send_chunks
    assert "it begins with '0" in refused(prometheus.url, limit=1 << 26)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "PROMETHEUS_URL is not set"),
        ("prometheus:9090", "is no http:// or https:// address"),
        ("file:///etc/passwd", "is no http:// or https:// address"),
        ("http://", "is no http:// or https:// address"),
        ("http://a:99999", "is no http:// or https:// address"),
        ("http://[::1", "is no http:// or https:// address"),
    ],
)
def test_what_is_no_address_is_refused_before_anybody_is_asked(url: str, said: str) -> None:
    assert said in refused(url)


def test_a_host_without_address_and_a_server_that_is_not_there_are_said() -> None:
    assert "Prometheus at http://nowhere.invalid:9090: " in refused("http://nowhere.invalid:9090")
    with ReservedPort() as port:
        text = refused(f"http://{port.address}")
    assert f"Prometheus at http://{port.address}: " in text and "refused" in text
    assert "PROMETHEUS_URL" in text
    with Prometheus() as plain:
        assert "SSL" in refused(plain.url.replace("http:", "https:"))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (answers(200, b"<html><body>Login", "text/html"), "begins with '<html><body>Login'"),
        (answers(200, b""), "begins with ''"),
        (answers(200, b"\xff\x00\x1b[2J"), "is not Prometheus's"),
        (answers(200, b"[" * 100_000), "is not Prometheus's"),
        (answers(200, b"{}"), "is not Prometheus's"),
        (answers(200, b'{"status": "success", "data": 7}'), "is not Prometheus's"),
        (answers(200, NO_SERIES), "is not Prometheus's"),
        (answers(200, HUGE), "is not Prometheus's"),
        (answers(200, b" " * (1 << 21)), "longer than 1 MiB"),
        (
            answers(422, b'{"status": "error", "error": "too many samples\\u001b"}'),
            f"it answers 422 {HTTPStatus(422).phrase}: too many samples?",
        ),
        (answers(200, b'{"status": "error", "error": "no"}'), "it cannot answer: no"),
        (answers(404, b"not found", "text/plain"), "it answers 404 Not Found;"),
        (answers(302, b"", Location="file:///etc/passwd"), "it answers 302 Found;"),
        (sends(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n{"), "it begins with '{'"),
        (sends(b"SSH-2.0-OpenSSH_9.2\r\n"), "SSH-2.0"),
    ],
)
def test_what_is_no_answer_is_said(prometheus: Prometheus, act: Act, said: str) -> None:
    prometheus.act = act
    text = refused(prometheus.url)
    assert said in text
    assert text.isprintable()


def test_a_server_that_never_answers_is_waited_for_no_longer_than_the_deadline(
    prometheus: Prometheus,
) -> None:
    over = threading.Event()

    def never(_: BaseHTTPRequestHandler) -> None:
        over.wait(30)

    prometheus.act = never
    try:
        assert "no answer within 0.2 s" in refused(prometheus.url, seconds=0.2)
    finally:
        over.set()


@pytest.mark.real_time
def test_a_server_that_gives_a_byte_now_and_then_is_left_at_the_deadline(
    prometheus: Prometheus,
) -> None:
    over = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        while not over.wait(0.05):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    prometheus.act = drip
    try:
        assert "no answer within 0.3 s" in refused(prometheus.url, seconds=0.3)
    finally:
        over.set()


def test_a_password_goes_to_the_server_and_nowhere_else(prometheus: Prometheus) -> None:
    with Prometheus() as other:
        prometheus.act = answers(307, b"", Location=other.url)
        text = refused(prometheus.url.replace("http://", "http://who:s%40cret@"))
        token = base64.b64encode(b"who:s@cret").decode()
        assert prometheus.asked[0][1]["Authorization"] == f"Basic {token}"
        assert not other.asked
        assert "cret" not in text and f"{prometheus.url}: it answers 307" in text


def test_proxies_of_the_environment_are_not_asked(
    prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert len(query_prometheus(prometheus.url, [QUERY])[0]) == 1


def test_the_command_says_it_in_one_line(tmp_path: Path, prometheus: Prometheus) -> None:
    site = Site(tmp_path)
    without = site.call("status", "--cluster")
    assert (without.exit_code, without.stdout) == (1, "")
    assert without.stderr.startswith("gpulock: status: PROMETHEUS_URL is not set")
    site.set(f"PROMETHEUS_URL={prometheus.url}\n")
    prometheus.act = answers(500, b"")
    broken = site.call("status", "--cluster")
    assert (broken.exit_code, broken.stdout, broken.stderr.count("\n")) == (1, "", 1)
    assert "it answers 500" in broken.stderr
