# SPDX-License-Identifier: Apache-2.0
"""The bodies of one sample: each format written once, each encoding made once, then cached."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable

from gpulock_exporter.web.negotiation import (
    GZIP,
    IDENTITY,
    Format,
    negotiate_encoding,
    negotiate_format,
)
from gpulock_exporter.web.response import Headers, HttpRequest, HttpResponse

GZIP_LEVEL = 1  # level 9, prometheus_client's, takes ten times as long for 25 % fewer bytes
_GZIP_CONTAINER = 31  # zlib's wbits for a gzip header, without a timestamp


class RenderedMetrics:
    """What one sample looks like to every client: keyed by (format, encoding), made on demand.

    A new sample gets a new object, so an old one goes with its last reader.
    """

    __slots__ = ("_bodies", "_lock", "_render")

    def __init__(self, render: Callable[[Format], bytes]) -> None:
        self._render = render
        self._bodies: dict[tuple[Format, str], bytes] = {}
        self._lock = threading.Lock()

    def body(self, form: Format, encoding: str) -> bytes:
        """Return the bytes for a client; of several at once, the first makes them."""
        with self._lock:
            return self._body(form, encoding)

    def _body(self, form: Format, encoding: str) -> bytes:
        key = (form, encoding)
        if key not in self._bodies:
            if encoding == GZIP:
                self._bodies[key] = gzip_body(self._body(form, IDENTITY))
            else:
                self._bodies[key] = self._render(form)
        return self._bodies[key]


def gzip_body(body: bytes) -> bytes:
    """Compress a body for a client that takes gzip."""
    return zlib.compress(body, GZIP_LEVEL, _GZIP_CONTAINER)


def negotiated_response(request: HttpRequest, rendered: RenderedMetrics) -> HttpResponse:
    """Answer a scrape in the format and the encoding that its headers ask for."""
    form = negotiate_format(request.headers.get("accept", ""))
    encoding = negotiate_encoding(request.headers.get("accept-encoding", ""))
    headers: Headers = (("Vary", "Accept, Accept-Encoding"),)
    if encoding != IDENTITY:
        headers += (("Content-Encoding", encoding),)
    return HttpResponse(200, rendered.body(form, encoding), form.value, headers)
