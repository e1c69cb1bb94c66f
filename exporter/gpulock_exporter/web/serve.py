# SPDX-License-Identifier: Apache-2.0
"""The life of one connection, in its own thread: handshake, then request after request."""

from __future__ import annotations

import ssl
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gpulock_exporter.web.connections import Connection, Phase
from gpulock_exporter.web.http import (
    BadRequest,
    Exchange,
    Handler,
    HeadReader,
    HttpRequest,
    HttpResponse,
    error_response,
    scrape_deadline,
)

_CHUNK = 4096
_MOST_DRAINED = 256 * 1024
_NOT_TLS = (
    b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n\r\nThis port speaks HTTPS only.\n"
)


@dataclass(frozen=True)
class ServerLimits:
    """How much and how long a client may; each deadline is for the whole of that phase."""

    connections: int = 160  # a TLS connection costs 60-100 KiB: its thread's stack and OpenSSL
    handshake_seconds: float = 5.0
    header_seconds: float = 5.0
    handle_seconds: float = 10.0  # where the client names no timeout: Prometheus's default
    write_seconds: float = 10.0
    idle_seconds: float = 150.0  # longer than two scrapes a minute apart
    linger_seconds: float = 1.0  # for a client to read why it is refused
    stop_seconds: float = 5.0
    arriving_seconds: float = 0.5  # at a stop, for the request of one that was just accepted
    header_bytes: int = 16 * 1024
    header_count: int = 100
    send_buffer_bytes: int = 128 * 1024  # the kernel's, for each connection


@dataclass(frozen=True)
class WebSettings:
    """What a reload can change: swapped as one object, so that no request sees half of it."""

    tls: ssl.SSLContext | None = None
    refusal: Callable[[HttpRequest], HttpResponse | None] | None = None  # before the handler


@dataclass
class ServerContext:
    """What all connections of a server share."""

    handler: Handler
    limits: ServerLimits
    settings: WebSettings
    log: Callable[[str], None]
    is_stopping: bool = False
    answered: Counter[int] = field(default_factory=Counter[int])  # by status
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, status: int) -> None:
        """Count an answer that was written."""
        with self._lock:
            self.answered[status] += 1


def serve_connection(connection: Connection, service: ServerContext) -> None:
    """Serve a connection to its end; raise OSError when the client ends it, or it is cut."""
    settings = service.settings
    if settings.tls is not None:
        try:
            connection.secure(settings.tls)
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                connection.send_raw(_NOT_TLS)
                _linger_on_close(connection, service)
            return
    reader = HeadReader(service.limits.header_bytes)
    connection.enter(Phase.HEADER, service.limits.header_seconds)
    while _serve_one_request(connection, service, reader, settings):
        if not reader:
            connection.enter(Phase.IDLE, service.limits.idle_seconds)


def _serve_one_request(
    connection: Connection, service: ServerContext, reader: HeadReader, settings: WebSettings
) -> bool:
    """Answer the next request; tell whether another may follow."""
    exchange = Exchange()
    try:
        head = _read_next_head(connection, service, reader)
        if head is None:
            return False
        request = exchange.parse(head, service.limits.header_count, connection.peer)
    except BadRequest as error:
        response, is_last = error.response, True
    else:
        response = _answer_request(connection, request, service)
        # After a reload the old handshake, and who was let in by it, is good for one answer more.
        is_last = service.is_stopping or service.settings is not settings
    pieces = exchange.answer(response, is_last)
    connection.enter(Phase.WRITE, service.limits.write_seconds)
    for piece in pieces:
        connection.send(piece)
    service.count(response.status)
    if exchange.may_go_on:
        return True
    _linger_on_close(connection, service)
    return False


def _read_next_head(
    connection: Connection, service: ServerContext, reader: HeadReader
) -> bytes | None:
    """Read until there is a whole head; None when the client is done."""
    while True:
        if reader:
            if connection.state.phase is not Phase.HEADER:
                connection.enter(Phase.HEADER, service.limits.header_seconds)
            head = reader.take()
            if head is not None:
                return head
        data = connection.receive(_CHUNK)
        if not data:
            return None
        reader.feed(data)


def _answer_request(
    connection: Connection, request: HttpRequest, service: ServerContext
) -> HttpResponse:
    now = time.monotonic()
    deadline = scrape_deadline(request.headers, now, service.limits.handle_seconds)
    # What overruns it is of no use to the client; the second more is for the watchdog alone.
    connection.enter(Phase.HANDLE, deadline - now + 1.0)
    request = replace(request, deadline=deadline)
    refusal = service.settings.refusal
    try:
        return (refusal and refusal(request)) or service.handler(request)
    except Exception:  # a fault in a handler is the exporter's, not the connection's
        service.log(f"{request.method} {request.path} failed:\n{traceback.format_exc()}")
        return error_response(500, "the exporter failed here; its log says how")


def _linger_on_close(connection: Connection, service: ServerContext) -> None:
    connection.enter(Phase.LINGER, service.limits.linger_seconds)
    connection.drain(_MOST_DRAINED)
