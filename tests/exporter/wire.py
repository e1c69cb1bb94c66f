# SPDX-License-Identifier: Apache-2.0
"""A polite client, and bytes on a socket without an HTTP library, for those that are not."""

from __future__ import annotations

import base64
import http.client
import select
import socket
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

SOUND = b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n"


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        """Return the body as text."""
        return self.body.decode()


def fetch(
    port: int,
    path: str = "/metrics",
    headers: Mapping[str, str] | None = None,
    *,
    context: ssl.SSLContext | None = None,
    method: str = "GET",
    source: str = "",
    seconds: float = 60.0,
) -> Answer:
    """Ask on a connection of its own; raise OSError where nothing listens."""
    # Port 0 is bound only for a source: the kernel gives it such ports as servers get, and
    # keeps them for a minute after the client has closed (TIME_WAIT).
    own = (source, 0) if source else None
    connection = http.client.HTTPConnection("127.0.0.1", port, seconds, source_address=own)
    try:
        connection.connect()
        if context is not None:
            connection.sock = context.wrap_socket(connection.sock, server_hostname="127.0.0.1")
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def as_user(user: str, password: str) -> dict[str, str]:
    """Return the header by which a user is known."""
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


def dial(port: int, context: ssl.SSLContext | None = None, buffer: int = 0) -> socket.socket:
    """Connect; with a context, do the handshake too; with a buffer, hold no more than that."""
    raw = socket.socket()
    try:
        raw.settimeout(60)
        if buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        raw.connect(("127.0.0.1", port))
        if context is None:
            return raw
        return context.wrap_socket(raw, server_hostname="127.0.0.1")
    except BaseException:
        raw.close()
        raise


def dial_many(port: int, context: ssl.SSLContext | None, count: int) -> list[socket.socket]:
    """Connect so often; leave out those for which no place came free in time."""
    found: list[socket.socket] = []
    for _ in range(count):
        with suppress(OSError):
            found.append(dial(port, context))
    return found


def is_gone(one: socket.socket) -> bool:
    """Tell whether the server has ended a connection on which nothing more is expected."""
    poll = select.poll()  # select(2) knows no descriptor above 1023
    poll.register(one, select.POLLIN)
    if not poll.poll(0):
        return False
    one.settimeout(0.05)
    try:
        while one.recv(65536):
            pass
    except socket.timeout:  # TimeoutError from Python 3.10 on
        return False
    except OSError:
        return True
    return True


def left_open(connections: Iterable[socket.socket]) -> int:
    """Count those that the server has not ended."""
    return sum(not is_gone(one) for one in connections)


def exchange(one: socket.socket, data: bytes, seconds: float = 30.0) -> tuple[bytes, bool]:
    """Send bytes; return all that comes back, and whether the server then closed."""
    one.settimeout(seconds)
    try:
        one.sendall(data)
    except OSError:
        pass  # it has heard enough; its answer may still be there
    received = b""
    while True:
        try:
            part = one.recv(65536)
        except socket.timeout:  # TimeoutError from Python 3.10 on
            return received, False
        except OSError:
            return received, True
        if not part:
            return received, True
        received += part
