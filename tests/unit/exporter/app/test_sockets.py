# SPDX-License-Identifier: Apache-2.0
"""Where the exporter answers while other processes have its addresses."""

from __future__ import annotations

import socket
from queue import Empty, SimpleQueue

import pytest
from gpulock_exporter.app import sockets
from gpulock_exporter.app.sockets import listen_when_free, open_exporter_sockets
from gpulock_exporter.web.http import HttpRequest, HttpResponse
from gpulock_exporter.web.server import HttpServer

from tests.support.ports import ReservedPort


def nothing(_: HttpRequest) -> HttpResponse:
    raise AssertionError("nobody asks")


def test_the_address_that_another_process_takes_next_is_said_and_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "RETRY", 0.01)
    announced: SimpleQueue[str] = SimpleQueue()
    server = HttpServer(nothing, [], print)
    with ReservedPort() as first, ReservedPort() as second:
        addresses = [first.address, second.address]
        with socket.create_server(("127.0.0.1", first.number)):
            listeners, said = open_exporter_sockets(addresses)
            assert not listeners
            assert f"cannot listen on {first.address}: Address already in use" in said
            taken = socket.create_server(("127.0.0.1", second.number))
            listen_when_free(addresses, server, said, announced.put)
            with pytest.raises(Empty):
                announced.get(timeout=0.2)
        with taken:
            words = announced.get(timeout=60)
            assert f"answers nobody yet: cannot listen on {second.address}: " in words
        assert announced.get(timeout=60) == f"answers on {' '.join(addresses)}"
    server.start()
    server.stop()


@pytest.mark.parametrize("reuses", [True, False])
def test_a_reserved_port_is_given_to_nobody_and_refuses(reuses: bool) -> None:
    with ReservedPort() as port:
        for _ in range(20_000):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
                other.bind(("127.0.0.1", 0))
                assert other.getsockname()[1] != port.number
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.number))
