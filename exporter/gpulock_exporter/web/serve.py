# SPDX-License-Identifier: Apache-2.0
"""The life of one connection, in its own thread: handshake, then request after request."""

from __future__ import annotations

import ssl
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gpulock_exporter.web.client_names import certificate_alt_names
from gpulock_exporter.web.connection import Connection, Phase
from gpulock_exporter.web.http import (
    BadRequest,
    Exchange,
    HeadReader,
    join_request_headers,
    split_request_target,
)
from gpulock_exporter.web.negotiation import scrape_deadline
from gpulock_exporter.web.response import Handler, HttpRequest, HttpResponse, error_response
from gpulock_exporter.web.server_settings import ServerLimits, WebSettings

_CHUNK = 4096
_MOST_DRAINED = 256 * 1024
_NOT_TLS = (
    b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n\r\nThis port speaks HTTPS only.\n"
)


@dataclass(slots=True)
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
    if settings.tls is not None and not _secure_connection(connection, settings.tls, service):
        return
    reader = HeadReader(service.limits.header_bytes)
    connection.enter(Phase.HEADER, service.limits.header_seconds)
    while _serve_one_request(connection, service, reader, settings):
        if not reader:
            connection.enter(Phase.IDLE, service.limits.idle_seconds)


def _secure_connection(
    connection: Connection, context: ssl.SSLContext, service: ServerContext
) -> bool:
    try:
        certificate = connection.secure(context)
    except ssl.SSLError as error:
        if error.reason == "HTTP_REQUEST":
            connection.send_raw(_NOT_TLS)
            _linger_on_close(connection, service)
        return False
    connection.certificate_names = certificate_alt_names(certificate)
    return True


def _serve_one_request(
    connection: Connection, service: ServerContext, reader: HeadReader, settings: WebSettings
) -> bool:
    """Answer the next request; tell whether another may follow."""
    exchange = Exchange()
    try:
        request = _read_next_request(connection, service, reader, exchange)
    except BadRequest as error:
        response, is_last = error.response, True
    else:
        if request is None:
            return False
        response = _handle_request(request, service)
        # After a reload the old handshake, and who was let in by it, is good for one answer more.
        is_last = service.is_stopping or service.settings is not settings
    pieces = exchange.answer(response, service.settings.headers, is_last)
    connection.enter(Phase.WRITE, service.limits.write_seconds)
    for piece in pieces:
        connection.send(piece)
    service.count(response.status)
    if exchange.may_go_on:
        return True
    _linger_on_close(connection, service)
    return False


def _read_next_request(
    connection: Connection, service: ServerContext, reader: HeadReader, exchange: Exchange
) -> HttpRequest | None:
    """Read and parse the next request; None when the client is done."""
    head = _read_next_head(connection, service, reader)
    if head is None:
        return None
    parsed = exchange.parse(head, service.limits.header_count)
    path, query = split_request_target(parsed)
    headers = join_request_headers(parsed)
    now = time.monotonic()
    deadline = scrape_deadline(headers, now, service.limits.handle_seconds)
    # What overruns it is of no use to the client; the second more is for the watchdog alone.
    connection.enter(Phase.HANDLE, deadline - now + 1.0)
    return HttpRequest(
        parsed.method.decode("ascii"),
        path,
        query,
        headers,
        connection.peer,
        connection.certificate_names,
        deadline,
    )


def _read_next_head(
    connection: Connection, service: ServerContext, reader: HeadReader
) -> bytes | None:
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


def _handle_request(request: HttpRequest, service: ServerContext) -> HttpResponse:
    try:
        return service.settings.refusal(request) or service.handler(request)
    except Exception:  # a fault in a handler is the exporter's, not the connection's
        service.log(f"{request.method} {request.path} failed:\n{traceback.format_exc()}")
        return error_response(500, "the exporter failed here; its log says how")


def _linger_on_close(connection: Connection, service: ServerContext) -> None:
    connection.enter(Phase.LINGER, service.limits.linger_seconds)
    connection.drain(_MOST_DRAINED)
