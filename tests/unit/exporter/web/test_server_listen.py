# SPDX-License-Identifier: Apache-2.0
"""Where the server listens: addresses, and sockets that systemd hands over."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest
from gpulock_exporter.web import listen
from gpulock_exporter.web.listen import (
    ListenError,
    Listening,
    activated_sockets,
    listen_on_address,
    parse_listen_address,
)

from tests.support.faults import raising

LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9445", ("", 9445)),
        ("127.0.0.1:9445", ("127.0.0.1", 9445)),
        ("[::1]:0", ("::1", 0)),
        ("node-7:65535", ("node-7", 65535)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_listen_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "9445", "node", "node:", ":x", ":-1", ":65536", "::1:9445", "[::1]", ":\uff11"),
        *("[]:9445", ":" + "1" * 5000),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ListenError, match=r"write host:port|brackets"):
        parse_listen_address(text)


def test_an_address_that_is_taken_costs_no_other_and_is_had_once_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listening = Listening(["127.0.0.1:0", f"127.0.0.1:{port}"], {})
        (one,) = listening.open()
        assert listening.words(5) == (
            f"answers on 127.0.0.1:0: cannot listen on 127.0.0.1:{port}: Address already in use; "
            "it tries again every 5 s"
        )
        assert listening.open() == []
    with monkeypatch.context() as broken:
        broken.setattr(socket, "getaddrinfo", raising(socket.gaierror("no name server")))
        assert listening.open() == [], "what is served already goes on"
        assert "no name server; it tries again" in listening.words(5)
    (other,) = listening.open()
    assert listening.words(5) == f"answers on 127.0.0.1:0 127.0.0.1:{port}"
    one.close()
    other.close()


def test_a_name_of_both_kinds_is_served_where_there_is_no_ipv6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.create_server

    def create(where: Any, **about: Any) -> socket.socket:
        if about["family"] == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return real(where, **about)

    both = [(family, 1, 6, "", (host, 0)) for family, host in LOOPBACKS]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    monkeypatch.setattr(socket, "create_server", create)
    (one,) = listen_on_address("both:0")
    one.close()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both[1:])
    with pytest.raises(ListenError, match="both:0: Cannot assign requested address"):
        listen_on_address("both:0")


def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(ListenError, match=r"no-such-host\.invalid:1"):
        listen_on_address("no-such-host.invalid:1")


def test_one_socket_serves_both_when_no_host_is_named() -> None:
    (one,) = listen_on_address(":0")
    with one:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, one.getsockname()[1])).close()


def hand_over(*handed: socket.socket) -> tuple[dict[str, str], int]:
    """Give what systemd gives: variables, and sockets one after another from a number on."""
    first = 100 + max(map(int, os.listdir("/proc/self/fd")))  # far from what opens beside it
    for index, one in enumerate(handed):
        os.dup2(one.fileno(), first + index)
    own = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(handed) or 1)}
    return {**own, "LISTEN_FDNAMES": "web", "LISTEN_PIDFDID": "7", "HOME": "/"}, first


def test_sockets_are_taken_over_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        environ, first = hand_over(a, b)
        taken = activated_sockets(environ, first)
        assert [one.getsockname() for one in taken] == [a.getsockname(), b.getsockname()]
        assert not any(one.get_inheritable() for one in taken)
        assert environ == {"HOME": "/"}
        assert activated_sockets(environ, first) == []
        for one in taken:
            one.close()


def test_beside_systemds_sockets_no_address_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as handed:
        monkeypatch.setattr(listen, "activated_sockets", lambda _: [handed])
        listening = Listening(["127.0.0.1:0"], {})
        assert listening.open() == [handed]
        assert listening.words(5) == "answers on systemd's sockets"


@pytest.mark.parametrize("count", ["x", "-1", "65", "\uff11"])
def test_a_number_of_sockets_that_is_none_is_refused(count: str) -> None:
    with pytest.raises(ListenError, match="LISTEN_FDS"):
        activated_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count})
    assert activated_sockets({"LISTEN_PID": "1", "LISTEN_FDS": count}) == [], "another process'"
