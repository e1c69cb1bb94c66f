# SPDX-License-Identifier: Apache-2.0
"""The server answers what its handler says, to several clients, in time, and ends well."""

from __future__ import annotations

import calendar
import threading
import time
from collections.abc import Generator

import pytest
from gpulock_exporter.web.http import HttpRequest, HttpResponse, SampleBody, route_by_path
from gpulock_exporter.web.server import ServerLimits

from tests.exporter.servers import SOUND, Running, dial, exchange, fetch, is_gone, running
from tests.support.faults import raising
from tests.support.wait import let_work, wait_until

pytestmark = pytest.mark.slow

SHORT = ServerLimits(handle_seconds=0.5)


SAMPLE = b"gpulock_nvml_up 1\n" * 200
TABLE = route_by_path(
    {"/metrics": SampleBody(lambda: SAMPLE).response, "/fail": raising(ZeroDivisionError)}
)


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    with running(TABLE) as one:
        yield one


def test_a_scrape_gets_the_sample_and_head_is_get_without_the_body(server: Running) -> None:
    begun = time.time()
    answer = fetch(server.port)
    assert (answer.status, answer.body) == (200, SAMPLE)
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["Content-Encoding"] is None
    assert answer.headers["Connection"] == "close"
    assert answer.headers["Vary"] == "Accept-Encoding"
    sent = time.strptime(answer.headers["Date"], "%a, %d %b %Y %H:%M:%S GMT")
    assert int(begun) <= calendar.timegm(sent) <= time.time()
    head = fetch(server.port, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == answer.headers["Content-Length"] == str(len(SAMPLE))


def test_a_handler_that_fails_is_500_and_in_the_log() -> None:
    with running(TABLE) as server:
        answer = fetch(server.port, "/fail")
        assert answer.status == 500
        assert b"ZeroDivision" not in answer.body
        assert "ZeroDivisionError" in server.log[0]
        nowhere = fetch(server.port, "/nowhere")
        assert nowhere.status == 404 and b"/metrics" in nowhere.body


def test_it_knows_whether_it_accepts() -> None:
    with running(TABLE) as one:
        wait_until(lambda: one.server.answers(10), why="the accepting thread to go round")
        assert one.server.is_serving and not one.server.answers(0), "it went round some time ago"
    assert [one.server.is_serving, one.server.answers(10)] == [False, False]


def test_a_handler_that_overruns_its_deadline_holds_its_client_no_longer() -> None:
    let_go = threading.Event()

    def hang(_request: HttpRequest) -> HttpResponse:
        let_go.wait(60)
        return HttpResponse(200)

    with running(hang, limits=SHORT) as server, dial(server.port) as one:
        assert exchange(one, SOUND) == (b"", True)
        let_go.set()


def test_the_newcomer_gets_in_when_all_places_are_taken_and_the_oldest_goes() -> None:
    with running(TABLE, limits=ServerLimits(connections=10)) as server:
        silent = [dial(server.port) for _ in range(10)]
        wait_until(lambda: server.server.connections == 10, why="ten connections")
        assert fetch(server.port).status == 200
        assert [is_gone(one) for one in silent] == [True] + [False] * 9
        for one in silent:
            one.close()


def test_no_place_comes_free_while_every_handler_is_at_work() -> None:
    let_go, at_work = threading.Event(), threading.Semaphore(0)

    def wait(_request: HttpRequest) -> HttpResponse:
        at_work.release()
        let_go.wait(60)
        return HttpResponse(200)

    with running(wait, limits=ServerLimits(connections=3)) as server:
        busy = [dial(server.port) for _ in range(3)]
        for one in busy:
            one.sendall(SOUND)
            assert at_work.acquire(timeout=60)
        with dial(server.port) as late:
            assert exchange(late, SOUND) == (b"", True)
        let_go.set()
        for one in busy:
            assert exchange(one, b"")[0].startswith(b"HTTP/1.0 200 ")
            one.close()


def test_stop_lets_an_answer_be_finished_and_ends_the_idle() -> None:
    begun = threading.Event()

    def slow(request: HttpRequest) -> HttpResponse:
        if request.path == "/slow":
            begun.set()
            let_work(0.5)
        return HttpResponse(200, b"whole")

    with running(slow) as server:
        idle, busy = dial(server.port), dial(server.port)
        busy.sendall(SOUND.replace(b"/metrics", b"/slow"))
        assert begun.wait(60)
    said, closed = exchange(busy, b"")
    assert said.endswith(b"whole")
    assert closed
    assert is_gone(idle)
    with pytest.raises(ConnectionRefusedError):
        dial(server.port)
    idle.close()
    busy.close()
