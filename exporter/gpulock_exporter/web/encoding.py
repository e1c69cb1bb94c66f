# SPDX-License-Identifier: Apache-2.0
"""The metrics of a sample in the encoding that a client takes: each made once."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable

from gpulock_exporter.web.http import HttpRequest, HttpResponse

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_LEVEL = 1  # level 9 takes ten times as long for 25 % fewer bytes
_GZIP_CONTAINER = 31  # zlib's wbits for a gzip header, without a timestamp


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
                return HttpResponse(200, self._plain, TEXT_FORMAT, (("Vary", "Accept-Encoding"),))
            self._zipped = self._zipped or gzip_body(self._plain)
        headers = (("Vary", "Accept-Encoding"), ("Content-Encoding", "gzip"))
        return HttpResponse(200, self._zipped, TEXT_FORMAT, headers)


def takes_gzip(accept_encoding: str) -> bool:
    """Tell whether a client takes a body that is compressed; `gzip;q=0` says that it does not."""
    elements = accept_encoding.replace(" ", "").lower().split(",")
    weights = {name: weight for name, _, weight in (one.partition(";") for one in elements)}
    return weights.get("gzip", "q=0").rstrip("0.") != "q="


def gzip_body(body: bytes) -> bytes:
    """Compress a body."""
    packer = zlib.compressobj(_LEVEL, wbits=_GZIP_CONTAINER)
    return packer.compress(body) + packer.flush()
