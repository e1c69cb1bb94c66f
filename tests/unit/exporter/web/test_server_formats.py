# SPDX-License-Identifier: Apache-2.0
"""The encoding that a client takes, and how often a sample is written."""

from __future__ import annotations

import gzip
import threading

import pytest
from gpulock_exporter.web.http import HttpRequest, HttpResponse, SampleBody, takes_gzip

from tests.support.wait import let_work

ZIPPED = HttpRequest("/metrics", headers={"accept-encoding": "gzip"})


@pytest.mark.parametrize(
    ("accepted", "taken"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP;q=0.1", True),
        ("deflate, gzip; q=1.0, *;q=0.5", True),
        ("gzip;q=0, *", False),
        ("gzip;q=0.000", False),
        ("br, zstd, xgzip", False),
        (",;,=;q=", False),
    ],
)
def test_gzip_is_used_where_it_is_taken(accepted: str, taken: bool) -> None:
    assert takes_gzip(accepted) is taken


def test_each_body_is_made_once_however_many_ask_at_once() -> None:
    written: list[int] = []

    def render() -> bytes:
        let_work(0.05)
        written.append(1)
        return b"gpulock_nvml_up 1\n" * 100

    sample = SampleBody(render)
    answers: list[HttpResponse] = []
    threads = [
        threading.Thread(target=lambda: answers.append(sample.response(ZIPPED))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(answer.body) for answer in answers}) == 1
    assert gzip.decompress(answers[0].body) == sample.response(HttpRequest("/metrics")).body
    assert written == [1]
