# SPDX-License-Identifier: Apache-2.0
"""Ask a Prometheus server: instant queries by its HTTP API, within a deadline.

What answers may be anything: no server, a proxy's page, garbage without end. Each is a Refused
that says so. Neither the environment's proxies nor another scheme than HTTP are followed.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, quote, unquote, urlencode

from gpulock.cli.session import CommandRefusedError
from gpulock.errors import one_line
from gpulock.install.setting_faults import parse_http_url

SECONDS = 10.0  # for all queries of one call together
LIMIT = 1 << 26  # bytes of an answer: 1,000 nodes with 8 GPUs are about 20 MB
SHOWN = 60  # characters of what a server said instead of an answer
DO = "look at PROMETHEUS_URL in gpulock.conf, and at that server"
QUERY = "/api/v1/query"
NO_ANSWER = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)


class Series(NamedTuple):
    """One series at one moment."""

    name: str
    labels: dict[str, str]
    value: float


class PrometheusAnswerError(ValueError):
    """Say what is wrong with an answer."""


def query_prometheus(
    url: str, queries: Sequence[str], seconds: float = SECONDS, limit: int = LIMIT
) -> list[list[Series]]:
    """Return the answer to each query; raise Refused.

    A thread waits for the server: a name service or a server that gives a byte now and then keeps
    nobody longer than `seconds`.
    """
    parts = parse_prometheus_url(url)
    found: list[list[Series]] = []
    fault: list[Exception] = []

    def work() -> None:
        try:
            found.extend(
                [
                    parse_prometheus_vector(fetch_prometheus_answer(parts, one, seconds, limit))
                    for one in queries
                ]
            )
        except Exception as error:  # whatever it is, the other thread says it
            fault.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    shown = redact_prometheus_url(parts)
    if fault:
        raise CommandRefusedError(
            f"Prometheus at {shown}: {describe_query_fault(fault[0], seconds)}", DO
        ) from fault[0]
    if len(found) < len(queries):
        raise CommandRefusedError(f"Prometheus at {shown}: no answer within {seconds:g} s", DO)
    return found


def parse_prometheus_url(url: str) -> SplitResult:
    """Return the parts of a server's address; raise Refused where it is none."""
    if not url:
        raise CommandRefusedError(
            "PROMETHEUS_URL is not set: no server is known that sees all nodes",
            "set it in gpulock.conf, such as PROMETHEUS_URL=http://prometheus:9090",
        )
    if parts := parse_http_url(url):
        return parts
    raise CommandRefusedError(
        "PROMETHEUS_URL is no http:// or https:// address", "correct it in gpulock.conf"
    )


def redact_prometheus_url(parts: SplitResult) -> str:
    """Return an address as it is shown: without a password."""
    return one_line(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())


def fetch_prometheus_answer(parts: SplitResult, query: str, seconds: float, limit: int) -> bytes:
    """Return the body of an answer, of an error as well; raise OSError, or AnswerError."""
    bare = parts._replace(
        netloc=parts.netloc.rpartition("@")[2],
        path=quote(parts.path.rstrip("/") + QUERY, safe="/%"),
        query=urlencode({"query": query, "timeout": f"{seconds:g}s"}),
        fragment="",
    )
    request = urllib.request.Request(bare.geturl(), headers={"Accept": "application/json"})
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        # not to whom a redirect leads
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
    try:
        with make_url_opener().open(request, timeout=seconds) as answer:
            return read_answer_body(answer, limit)
    except HTTPError as error:
        with error:
            said = error_of_answer(read_answer_body(error, limit))
        raise PrometheusAnswerError(f"it answers {error.code} {error.reason}{said}") from None


def error_of_answer(data: bytes) -> str:
    """Return what Prometheus says of an error, nothing where somebody else answers."""
    try:
        return f": {one_line(str(json.loads(data)['error']))[:200]}"
    except NO_ANSWER:
        return ""


def make_url_opener() -> urllib.request.OpenerDirector:
    """Return what opens http and https, and nothing else."""
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        made.add_handler(handler)
    return made


def read_answer_body(answer: Any, limit: int) -> bytes:
    """Return what a server sends; raise AnswerError where there is no end of it."""
    data: bytes = answer.read(limit + 1)
    if len(data) > limit:
        raise PrometheusAnswerError(f"its answer is longer than {limit >> 20} MiB")
    if getattr(answer, "length", None):
        raise PrometheusAnswerError("its answer is cut short")
    return data


def parse_prometheus_vector(data: bytes) -> list[Series]:
    """Return the series of an answer; raise AnswerError where it is none. Pure."""
    try:
        answer = json.loads(data)
        if answer["status"] != "success":
            raise PrometheusAnswerError(f"it cannot answer: {one_line(str(answer['error']))[:200]}")
        return [parse_prometheus_series(one) for one in answer["data"]["result"]]
    except PrometheusAnswerError:
        raise
    except NO_ANSWER:
        said = one_line(" ".join(data[: 4 * SHOWN].decode("utf-8", "replace").split()))[:SHOWN]
        what = f"its answer is not Prometheus's: it begins with {said!r}"
        raise PrometheusAnswerError(what) from None


def parse_prometheus_series(one: Any) -> Series:
    """Return one series; control characters of its labels reach no terminal."""
    labels = {str(key): one_line(str(value)) for key, value in one["metric"].items()}
    return Series(labels.pop("__name__", ""), labels, float(one["value"][1]))


def describe_query_fault(fault: Exception, seconds: float) -> str:
    """Return a fault as a clause."""
    reason = fault.reason if isinstance(fault, URLError) else fault
    if isinstance(reason, (TimeoutError, socket.timeout)):  # one from Python 3.10 on
        return f"no answer within {seconds:g} s"
    return one_line(str(reason)) or type(reason).__name__
