# SPDX-License-Identifier: Apache-2.0
"""Requests and responses, and their text, which is the standard library's: http.server.

A connection carries one request. What follows it is never read as another one.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO

PLAIN_TEXT = "text/plain; charset=utf-8"
METRICS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_LEVEL = 1  # level 9 takes ten times as long for 25 % fewer bytes


@dataclass(frozen=True)
class HttpRequest:
    """One GET or HEAD."""

    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # names in lower case
    peer: str = ""  # the client's address


@dataclass(frozen=True)
class HttpResponse:
    """One answer; Date, Content-Length and Connection are added."""

    status: int
    body: bytes = b""
    content_type: str = PLAIN_TEXT
    headers: tuple[tuple[str, str], ...] = ()


Handler = Callable[[HttpRequest], HttpResponse]


def error_response(status: int, sentence: str, *headers: tuple[str, str]) -> HttpResponse:
    """Answer with an error and one sentence that says what is wrong."""
    phrase = HTTPStatus(status).phrase
    return HttpResponse(status, f"{status} {phrase}: {sentence}\n".encode(), headers=headers)


def route_by_path(table: Mapping[str, Handler]) -> Handler:
    """Make one handler of a table of exact paths."""

    def handle(request: HttpRequest) -> HttpResponse:
        handler = table.get(request.path)
        if handler is None:
            return error_response(404, f"nothing is here; try {' '.join(sorted(table))}")
        return handler(request)

    return handle


class SampleBody:
    """What one sample looks like to every client; a new sample gets a new object."""

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render
        self._plain = self._zipped = b""
        self._lock = threading.Lock()

    def response(self, request: HttpRequest) -> HttpResponse:
        """Answer a scrape; of several at once, the first makes the bytes."""
        with self._lock:
            self._plain = self._plain or self._render()
            if not takes_gzip(request.headers.get("accept-encoding", "")):
                return HttpResponse(200, self._plain, METRICS_TEXT, (("Vary", "Accept-Encoding"),))
            self._zipped = self._zipped or gzip.compress(self._plain, _LEVEL, mtime=0)
        headers = (("Vary", "Accept-Encoding"), ("Content-Encoding", "gzip"))
        return HttpResponse(200, self._zipped, METRICS_TEXT, headers)


def takes_gzip(accept_encoding: str) -> bool:
    """Tell whether a client takes a body that is compressed; `gzip;q=0` says that it does not."""
    elements = accept_encoding.replace(" ", "").lower().split(",")
    weights = {name: weight for name, _, weight in (one.partition(";") for one in elements)}
    return weights.get("gzip", "q=0").rstrip("0.") != "q="


class HttpExchange(BaseHTTPRequestHandler):
    """A request's head, and the text of its answer: what http.server makes of bytes."""

    default_request_version = request_version = "HTTP/1.0"  # of 0.9 it would say no status
    server_version, sys_version = "gpulock", "exporter"
    command = requestline = ""

    def __init__(self, head: bytes, most: int, peer: str, handler: Handler) -> None:
        # no socket, and nobody's __init__: reading and writing are the server's, by its deadlines
        self.rfile, self.wfile = BytesIO(head), (text := BytesIO())
        self._peer, self._handler = peer, handler
        self.body = b""
        if len(head) > most:
            self.send_error(431, f"the header is longer than {most} bytes")
        else:
            self.handle_one_request()
        self.text = text.getvalue()  # all that is sent before the body

    def do_GET(self) -> None:
        """Answer by the handler."""
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._respond(self._handler(HttpRequest(path, query, headers, self._peer)))

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what http.server cannot read."""
        self._respond(error_response(code, explain or message or "this cannot be read"))

    def log_message(self, format: str, *args: object) -> None:
        """Log no request."""

    def _respond(self, response: HttpResponse) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Connection", "close")
        for name, value in response.headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.body = response.body
