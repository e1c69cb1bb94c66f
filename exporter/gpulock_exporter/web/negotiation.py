# SPDX-License-Identifier: Apache-2.0
"""Metrics in the format and the encoding that a client asks for: each made once a sample."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from enum import Enum

from gpulock_exporter.web.http import Headers, HttpRequest, HttpResponse

IDENTITY = "identity"
GZIP = "gzip"

GZIP_LEVEL = 1  # level 9, prometheus_client's, takes ten times as long for 25 % fewer bytes
_GZIP_CONTAINER = 31  # zlib's wbits for a gzip header, without a timestamp


class Format(Enum):
    """A way to write metrics; the value is its Content-Type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def negotiate_format(accept: str) -> Format:
    """Choose by an Accept header: the highest q, then the first named; text when nothing fits.

    As in Prometheus's own expfmt: a version that we do not write is passed over, not refused.
    """
    for _, name, parameters in sorted(_parse_weighted_header(accept), key=lambda item: -item[0]):
        version = parameters.get("version")
        if name == "application/openmetrics-text" and version in {None, "1.0.0"}:
            return Format.OPENMETRICS
        if name in {"text/plain", "text/*", "*/*"} and version in {None, "0.0.4"}:
            return Format.TEXT
    return Format.TEXT


def negotiate_encoding(accept_encoding: str) -> str:
    """Choose gzip where the client takes it, else identity."""
    weights = {name: q for q, name, _ in _parse_weighted_header(accept_encoding, keep_refused=True)}
    wanted = weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0)))
    return GZIP if wanted > 0 else IDENTITY


def _parse_weighted_header(
    header: str, keep_refused: bool = False
) -> Iterator[tuple[float, str, dict[str, str]]]:
    for element in header.split(","):
        name, *rest = (part.strip() for part in element.split(";"))
        parameters = {
            key.strip().lower(): value.strip().strip('"')
            for key, _, value in (part.partition("=") for part in rest)
        }
        q = _parse_quality(parameters.pop("q", "1"))
        if name and (q > 0 or keep_refused):
            yield q, name.lower(), parameters


def _parse_quality(text: str) -> float:
    try:
        q = float(text)
    except ValueError:
        return 0.0
    return q if 0 <= q <= 1 else 0.0  # not a number compares false as well


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
    packer = zlib.compressobj(GZIP_LEVEL, wbits=_GZIP_CONTAINER)
    return packer.compress(body) + packer.flush()


def negotiated_response(request: HttpRequest, rendered: RenderedMetrics) -> HttpResponse:
    """Answer a scrape in the format and the encoding that its headers ask for."""
    form = negotiate_format(request.headers.get("accept", ""))
    encoding = negotiate_encoding(request.headers.get("accept-encoding", ""))
    headers: Headers = (("Vary", "Accept, Accept-Encoding"),)
    if encoding != IDENTITY:
        headers += (("Content-Encoding", encoding),)
    return HttpResponse(200, rendered.body(form, encoding), form.value, headers)
