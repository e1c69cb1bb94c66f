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

from gpulock_exporter.web.client_names import names_of
from gpulock_exporter.web.connection import Connection, Phase
from gpulock_exporter.web.http import Exchange, HeadReader, Unsound, headers_of, target_of
from gpulock_exporter.web.negotiation import scrape_deadline
from gpulock_exporter.web.response import Handler, Request, Response, refusal
from gpulock_exporter.web.server_settings import Limits, WebSettings

_CHUNK = 4096
_MOST_DRAINED = 256 * 1024
_NOT_TLS = (
    b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n\r\nThis port speaks HTTPS only.\n"
)


@dataclass(slots=True)
class Service:
    """What all connections of a server share."""

    handler: Handler
    limits: Limits
    settings: WebSettings
    log: Callable[[str], None]
    is_stopping: bool = False
    answered: Counter[int] = field(default_factory=Counter[int])  # by status
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, status: int) -> None:
        """Count an answer that was written."""
        with self._lock:
            self.answered[status] += 1


def converse(connection: Connection, service: Service) -> None:
    """Serve a connection to its end; raise OSError when the client ends it, or it is cut."""
    settings = service.settings
    if settings.tls is not None and not _secure(connection, settings.tls, service):
        return
    reader = HeadReader(service.limits.header_bytes)
    connection.enter(Phase.HEADER, service.limits.header_seconds)
    while _one_request(connection, service, reader, settings):
        if not reader:
            connection.enter(Phase.IDLE, service.limits.idle_seconds)


def _secure(connection: Connection, context: ssl.SSLContext, service: Service) -> bool:
    try:
        certificate = connection.secure(context)
    except ssl.SSLError as error:
        if error.reason == "HTTP_REQUEST":
            connection.send_raw(_NOT_TLS)
            _linger(connection, service)
        return False
    connection.certificate_names = names_of(certificate)
    return True


def _one_request(
    connection: Connection, service: Service, reader: HeadReader, settings: WebSettings
) -> bool:
    """Answer the next request; tell whether another may follow."""
    exchange = Exchange()
    try:
        request = _next_request(connection, service, reader, exchange)
    except Unsound as error:
        response, is_last = error.response, True
    else:
        if request is None:
            return False
        response = _response(request, service)
        # After a reload the old handshake, and who was let in by it, is good for one answer more.
        is_last = service.is_stopping or service.settings is not settings
    pieces = exchange.answer(response, service.settings.headers, is_last)
    connection.enter(Phase.WRITE, service.limits.write_seconds)
    for piece in pieces:
        connection.send(piece)
    service.count(response.status)
    if exchange.may_go_on:
        return True
    _linger(connection, service)
    return False


def _next_request(
    connection: Connection, service: Service, reader: HeadReader, exchange: Exchange
) -> Request | None:
    """Read and parse the next request; None when the client is done."""
    head = _next_head(connection, service, reader)
    if head is None:
        return None
    parsed = exchange.parse(head, service.limits.header_count)
    path, query = target_of(parsed)
    headers = headers_of(parsed)
    now = time.monotonic()
    deadline = scrape_deadline(headers, now, service.limits.handle_seconds)
    # What overruns it is of no use to the client; the second more is for the watchdog alone.
    connection.enter(Phase.HANDLE, deadline - now + 1.0)
    return Request(
        parsed.method.decode("ascii"),
        path,
        query,
        headers,
        connection.peer,
        connection.certificate_names,
        deadline,
    )


def _next_head(connection: Connection, service: Service, reader: HeadReader) -> bytes | None:
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


def _response(request: Request, service: Service) -> Response:
    try:
        return service.settings.refusal(request) or service.handler(request)
    except Exception:  # a fault in a handler is the exporter's, not the connection's
        service.log(f"{request.method} {request.path} failed:\n{traceback.format_exc()}")
        return refusal(500, "the exporter failed here; its log says how")


def _linger(connection: Connection, service: Service) -> None:
    connection.enter(Phase.LINGER, service.limits.linger_seconds)
    connection.drain(_MOST_DRAINED)
