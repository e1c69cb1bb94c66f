# SPDX-License-Identifier: Apache-2.0
"""Ask a Prometheus server: instant queries by its HTTP API.

What answers may be anything: no server, a proxy's page, garbage without end. Each is a Refused
that says so. No redirect is followed, and no proxy of the environment asked: what has the
password goes to the server that PROMETHEUS_URL names, and nowhere else.
"""

from __future__ import annotations

import base64
import json
import math
import socket
from collections.abc import Sequence
from http.client import OK, HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlencode

from gpulock.cli.session import CommandRefusedError
from gpulock.errors import one_line
from gpulock.install.setting_faults import parse_http_url

SECONDS = 10.0  # for each step of a query
LIMIT = 1 << 26  # bytes of an answer: 1,000 nodes with 8 GPUs are about 20 MB
SHOWN = 60  # characters of what a server said instead of an answer
DO = "look at PROMETHEUS_URL in gpulock.conf, and at that server"
NO_ANSWER = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


class Series(NamedTuple):
    """One series at one moment."""

    name: str
    labels: dict[str, str]
    value: float


def query_prometheus(
    url: str, queries: Sequence[str], seconds: float = SECONDS, limit: int = LIMIT
) -> list[list[Series]]:
    """Return the answer to each query; raise Refusal. No step of one waits beyond `seconds`."""
    parts = parse_http_url(url)
    if parts is None:
        what = "is no http:// or https:// address" if url else "is not set"
        do = "write it into gpulock.conf, such as PROMETHEUS_URL=http://prometheus:9090"
        raise CommandRefusedError(
            f"PROMETHEUS_URL {what}: no server is known that sees all nodes", do
        )
    try:
        return [parse_vector(fetch_answer(parts, one, seconds, limit)) for one in queries]
    except (OSError, HTTPException, ValueError) as fault:
        why = one_line(str(fault)) or type(fault).__name__
        if isinstance(fault, socket.timeout):  # TimeoutError from Python 3.10 on
            why = f"no answer within {seconds:g} s"
        shown = one_line(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
        raise CommandRefusedError(f"Prometheus at {shown}: {why}", DO) from fault


def fetch_answer(parts: SplitResult, query: str, seconds: float, limit: int) -> bytes:
    """Return the body of an answer; raise OSError, HTTPException or ValueError."""
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    path = quote(f"{parts.path.rstrip('/')}/api/v1/query", safe="/%")
    headers = {"Accept": "application/json"}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    words = urlencode({"query": query, "timeout": f"{seconds:g}s"})
    try:
        connection.request("GET", f"{path}?{words}", headers=headers)
        with connection.getresponse() as answer:
            data = answer.read(limit + 1)
            if len(data) > limit:
                raise ValueError(f"its answer is longer than {limit >> 20} MiB")
            if answer.status != OK:
                said = error_of_answer(data)
                raise ValueError(f"it answers {answer.status} {answer.reason}{said}")
            return data
    finally:
        connection.close()


def error_of_answer(data: bytes) -> str:
    """Return what Prometheus says of an error, nothing where somebody else answers."""
    try:
        return f": {one_line(str(json.loads(data)['error']))[:200]}"
    except NO_ANSWER:
        return ""


def parse_vector(data: bytes) -> list[Series]:
    """Return the series of an answer, but for values that no exporter has; raise ValueError."""
    try:
        answer = json.loads(data)
        failed = answer["status"] != "success"
        series = [] if failed else [parse_series(one) for one in answer["data"]["result"]]
    except NO_ANSWER:
        said = one_line(" ".join(data[: 4 * SHOWN].decode("utf-8", "replace").split()))[:SHOWN]
        raise ValueError(f"its answer is not Prometheus's: it begins with {said!r}") from None
    if failed:
        raise ValueError(f"it cannot answer{error_of_answer(data)}")
    return [one for one in series if math.isfinite(one.value) and one.value >= 0]


def parse_series(one: Any) -> Series:
    """Return one series; control characters of its labels reach no terminal."""
    labels = {one_line(str(key)): one_line(str(text)) for key, text in one["metric"].items()}
    return Series(labels.pop("__name__", ""), labels, float(one["value"][1]))
