# SPDX-License-Identifier: Apache-2.0
"""The format and the encoding that a client asks for, and how often a sample is written."""

from __future__ import annotations

import gzip
import threading

import pytest
from gpulock_exporter.web.negotiation import (
    GZIP,
    IDENTITY,
    Format,
    RenderedMetrics,
    negotiate_encoding,
    negotiate_format,
)

from tests.support.wait import let_work

OPENMETRICS = "application/openmetrics-text"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", Format.TEXT),
        ("*/*", Format.TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", Format.TEXT),
        (OPENMETRICS, Format.OPENMETRICS),
        (f"{OPENMETRICS}; version=1.0.0; charset=utf-8", Format.OPENMETRICS),
        (f'{OPENMETRICS};version="1.0.0"', Format.OPENMETRICS),
        (f"{OPENMETRICS.upper()}; Version=1.0.0", Format.OPENMETRICS),
        (f"{OPENMETRICS};version=0.0.1", Format.TEXT),
        (f"{OPENMETRICS};version=2.0.0,*/*;q=0.1", Format.TEXT),
        (f"{OPENMETRICS};version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4", Format.OPENMETRICS),
        (f"{OPENMETRICS};version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.4", Format.TEXT),
        (f"{OPENMETRICS},text/plain", Format.OPENMETRICS),
        (f"text/plain,{OPENMETRICS}", Format.TEXT),
        (f"{OPENMETRICS};q=0,text/plain;q=0.1", Format.TEXT),
        (f"{OPENMETRICS};q=nan", Format.TEXT),
        (f"{OPENMETRICS};q=2", Format.TEXT),
        (f"text/plain;version=1.0.0;q=0.9,{OPENMETRICS};q=0.1", Format.OPENMETRICS),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily", Format.TEXT),
        (",;,=;q=", Format.TEXT),
    ],
)
def test_the_format_is_the_best_of_those_we_write(accept: str, form: Format) -> None:
    assert negotiate_format(accept) is form


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("", IDENTITY),
        ("gzip", GZIP),
        ("GZIP;q=0.1", GZIP),
        ("x-gzip", GZIP),
        ("deflate, gzip;q=1.0, *;q=0.5", GZIP),
        ("*", GZIP),
        ("gzip;q=0, *", IDENTITY),
        ("*;q=0", IDENTITY),
        ("gzip;q=0", IDENTITY),
        ("identity", IDENTITY),
        ("br, zstd", IDENTITY),
    ],
)
def test_gzip_is_used_where_it_is_taken(accepted: str, encoding: str) -> None:
    assert negotiate_encoding(accepted) == encoding


def test_a_scrape_is_compressed_the_fast_way() -> None:
    fastest = 4  # RFC 1952: XFL, what the compressor was told; 2 is "as small as it gets"
    plain = b'gpulock_gpu_power_watts{gpu="0"} 412.5\n' * 1000
    found = RenderedMetrics(lambda _: plain).body(Format.TEXT, GZIP)
    assert (found[8], len(found) < len(plain) / 10) == (fastest, True)


def test_each_body_is_made_once_however_many_ask_at_once() -> None:
    written: list[Format] = []

    def render(form: Format) -> bytes:
        let_work(0.05)
        written.append(form)
        return form.value.encode() * 100

    rendered = RenderedMetrics(render)
    bodies: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: bodies.append(rendered.body(Format.TEXT, GZIP)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == [Format.TEXT]
    assert len({id(body) for body in bodies}) == 1
    plain = rendered.body(Format.TEXT, IDENTITY)
    assert gzip.decompress(bodies[0]) == plain
    assert written == [Format.TEXT]
    assert rendered.body(Format.OPENMETRICS, IDENTITY) != plain
    assert written == [Format.TEXT, Format.OPENMETRICS]
