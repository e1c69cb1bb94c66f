# SPDX-License-Identifier: Apache-2.0
"""What the server hands to a handler, and what a handler hands back: no sockets here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs

PLAIN_TEXT = "text/plain; charset=utf-8"

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request whose head was found sound; a request of this server has no body."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # names in lower case
    peer: str = ""  # the client's address; empty on a Unix socket
    names: frozenset[str] = frozenset()  # of the client's verified certificate
    deadline: float = float("inf")  # time.monotonic() at which the answer is of no more use

    def values(self, name: str) -> tuple[str, ...]:
        """Return every value of a query parameter, such as `name[]`, in order."""
        return tuple(parse_qs(self.query, keep_blank_values=True).get(name, ()))


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One answer; the server adds Date, Content-Length, Connection and the configured headers."""

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
