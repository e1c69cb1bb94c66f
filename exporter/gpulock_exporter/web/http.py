# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 on bytes, strictly: requests and responses, and how they cross a socket.

h11 takes what the RFC lets a server be lenient about (bare LF, folded headers, bodies of a GET).
Nothing that scrapes needs that, and each is half of a request smuggling: here it is an error.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs

import h11

PLAIN_TEXT = "text/plain; charset=utf-8"
# Prometheus gives up at its own timeout; what arrives just before that is too late for it.
SCRAPE_TIMEOUT_OFFSET_SECONDS = 0.5
LONGEST_SCRAPE_SECONDS = 300.0

_END = b"\r\n\r\n"
_UNSOUND = re.compile(rb"(?<!\r)\n|\r[^\n]|\0|\n[ \t]")
_PATH = re.compile(r"/|(/[A-Za-z0-9._~-]+)+/?")  # all that a route needs: nothing is decoded
_LONGEST_METHOD = 16
_VERSIONS = (b"1.0", b"1.1")

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class HttpRequest:
    """One request whose head was found sound; a request of this server has no body."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # names in lower case; one
    # that comes twice is joined by commas
    peer: str = ""  # the client's address; empty on a Unix socket
    deadline: float = float("inf")  # time.monotonic() at which the answer is of no more use

    def values(self, name: str) -> tuple[str, ...]:
        """Return every value of a query parameter, such as `name[]`, in order."""
        return tuple(parse_qs(self.query, keep_blank_values=True).get(name, ()))


@dataclass(frozen=True)
class HttpResponse:
    """One answer; the server adds Date, Content-Length and Connection."""

    status: int
    body: bytes = b""
    content_type: str = PLAIN_TEXT
    headers: Headers = ()


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


class BadRequest(ValueError):
    """A request that is refused as it stands; the connection ends with it."""

    def __init__(self, status: int, sentence: str, *headers: tuple[str, str]) -> None:
        super().__init__(sentence)
        self.response = error_response(status, sentence, *headers)


class HeadReader:
    """Cut request heads out of what a client sends; hold no more than one and what follows it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._searched = 0

    def __bool__(self) -> bool:
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add what has come."""
        self._buffer += data

    def take(self) -> bytes | None:
        """Return the next whole head, or None when more must come first."""
        end = self._buffer.find(_END, max(self._searched - len(_END), 0))
        stop = len(self._buffer) if end < 0 else end + len(_END)
        if _UNSOUND.search(self._buffer, max(self._searched - 1, 0), stop):
            raise BadRequest(400, "a line of the header is malformed")
        if stop > self._limit:
            raise BadRequest(431, f"the header is longer than {self._limit} bytes")
        if end < 0:
            self._searched = stop
            return None
        head = bytes(self._buffer[:stop])
        del self._buffer[:stop]
        self._searched = 0
        return head


class Exchange:
    """One request and its answer."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.SERVER)
        self._is_head = False

    def parse(self, head: bytes, most_headers: int, peer: str) -> HttpRequest:
        """Parse a whole head; raise BadRequest for anything but a plain GET or HEAD."""
        try:
            self._http.receive_data(head)
            request = self._http.next_event()
            if not isinstance(request, h11.Request):
                raise BadRequest(400, "the header is not complete")
            self._is_head = request.method == b"HEAD"
            _check_request_head(request, most_headers)
            self._http.next_event()  # the end of a request without a body
        except h11.RemoteProtocolError as error:
            raise BadRequest(400, str(error)) from error
        path, _, query = request.target.decode("ascii").partition("?")
        if not _PATH.fullmatch(path) or ".." in path.split("/") or "#" in query:
            raise BadRequest(400, "the target is not a plain path of this server")
        headers: dict[str, str] = {}
        for raw_name, raw_value in request.headers:
            name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return HttpRequest(request.method.decode("ascii"), path, query, headers, peer)

    def answer(self, response: HttpResponse, last: bool) -> list[bytes]:
        """Write a response, as pieces: the body is not copied."""
        http = self._http
        headers = [
            ("Date", time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time()))),
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *response.headers,
        ]
        if last:
            headers.append(("Connection", "close"))
        reason = HTTPStatus(response.status).phrase
        head = h11.Response(status_code=response.status, headers=headers, reason=reason)
        pieces = [http.send(head)]
        if not self._is_head:
            pieces.append(http.send(h11.Data(data=response.body)))
        http.send(h11.EndOfMessage())
        return [piece for piece in pieces if piece]

    @property
    def may_go_on(self) -> bool:
        """Tell whether the connection may carry another request."""
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE


def scrape_deadline(headers: Mapping[str, str], now: float, longest: float) -> float:
    """Return when an answer is of no more use, by X-Prometheus-Scrape-Timeout-Seconds.

    Without that header, or with one that makes no sense, it is `longest` seconds from now.
    """
    try:
        seconds = float(headers.get("x-prometheus-scrape-timeout-seconds", ""))
    except ValueError:
        return now + longest
    if not (math.isfinite(seconds) and seconds > 0):
        return now + longest
    usable = max(seconds - SCRAPE_TIMEOUT_OFFSET_SECONDS, seconds / 2)
    return now + min(usable, LONGEST_SCRAPE_SECONDS)


def _check_request_head(request: h11.Request, most_headers: int) -> None:
    if request.http_version not in _VERSIONS:
        raise BadRequest(505, "this server speaks HTTP/1.1")
    if len(request.method) > _LONGEST_METHOD:
        raise BadRequest(400, "there is no such method")
    if len(request.headers) > most_headers:
        raise BadRequest(431, f"there are more than {most_headers} headers")
    for name, value in request.headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            raise BadRequest(400, "a request must not have a body")
    if request.method not in {b"GET", b"HEAD"}:
        raise BadRequest(405, "only GET and HEAD are understood", ("Allow", "GET, HEAD"))
