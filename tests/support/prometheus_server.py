# SPDX-License-Identifier: Apache-2.0
"""A server on loopback that answers as Prometheus's HTTP API does, or as nobody should."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from gpulock.cli.status.cluster import QUERIES

Sample = tuple[dict[str, str], float]
Act = Callable[[BaseHTTPRequestHandler], None]


class Prometheus:
    """A server; `samples` are what it knows, by query. `act` answers in its place where it is set.

    `asked` are the requests: path with query, and headers.
    """

    def __init__(self) -> None:
        self.samples: dict[str, list[Sample]] = {query: [] for query in QUERIES}
        self.act: Act | None = None
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            """Answer, and write no log."""

            def do_GET(self) -> None:
                outer.asked.append((self.path, dict(self.headers.items())))
                try:
                    (outer.act or outer.answer)(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Prometheus:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def scrape(self, instance: str, text: str) -> None:
        """Take what an exporter says as Prometheus does."""
        series, infos, _ = QUERIES
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {"__name__": sample.name, **sample.labels, "instance": instance}
                if sample.name == "gpulock_gpu_info":
                    self.samples[infos].append((labels, sample.value))
                elif sample.name != "gpulock_gpu_state" or sample.value == 1:
                    self.samples[series].append((labels, sample.value))

    def lose(self, instance: str) -> None:
        """Have a target that does not answer."""
        self.samples[QUERIES[-1]].append(({"instance": instance, "job": "gpulock"}, 0))

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a query with its samples."""
        (query,) = parse_qs(urlsplit(handler.path).query)["query"]
        send(handler, 200, vector(self.samples[query]))


def vector(samples: Iterable[Sample]) -> bytes:
    """Return an answer of Prometheus."""
    result = [{"metric": labels, "value": [1700000000.5, str(v)]} for labels, v in samples]
    data = {"resultType": "vector", "result": result}
    return json.dumps({"status": "success", "data": data}).encode()


def send(
    handler: BaseHTTPRequestHandler,
    code: int,
    body: bytes,
    kind: str = "application/json",
    **headers: str,
) -> None:
    """Send an answer."""
    handler.send_response(code)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body)))
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
