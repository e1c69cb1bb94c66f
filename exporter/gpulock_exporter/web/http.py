# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 on bytes, strictly: request heads cut out of a stream, parsed by h11, and answered.

h11 takes what the RFC lets a server be lenient about (bare LF, folded headers, bodies of a GET).
Nothing that scrapes needs that, and each is half of a request smuggling: here it is an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from http import HTTPStatus

import h11

from gpulock_exporter.web.response import Headers, HttpResponse, error_response

_END = b"\r\n\r\n"
_UNSOUND = re.compile(rb"(?<!\r)\n|\r[^\n]|\0|\n[ \t]")
_PATH = re.compile(r"/|(/[A-Za-z0-9._~-]+)+/?")  # all that a route needs: nothing is decoded
_LONGEST_METHOD = 16
_VERSIONS = (b"1.0", b"1.1")


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

    def parse(self, head: bytes, most_headers: int) -> h11.Request:
        """Parse a whole head; raise Unsound for anything but a plain GET or HEAD."""
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
        return request

    def answer(self, response: HttpResponse, added: Headers, last: bool) -> list[bytes]:
        """Write a response, as pieces: the body is not copied."""
        http = self._http
        headers = [
            ("Date", time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())),
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *response.headers,
            *added,
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


def split_request_target(request: h11.Request) -> tuple[str, str]:
    """Split the target into its path and its query; raise Unsound for any but a plain path."""
    path, _, query = request.target.decode("ascii").partition("?")
    if not _PATH.fullmatch(path) or ".." in path.split("/") or "#" in query:
        raise BadRequest(400, "the target is not a plain path of this server")
    return path, query


def join_request_headers(request: h11.Request) -> Mapping[str, str]:
    """Return the headers by their lower-case names; one that comes twice is joined by commas."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in request.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


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
