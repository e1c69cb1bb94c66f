# SPDX-License-Identifier: Apache-2.0
"""A server in the test's own process, on loopback."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpulock_exporter.web.http import Handler, HttpRequest, HttpResponse
from gpulock_exporter.web.listen import listen_on_address
from gpulock_exporter.web.server import HttpServer, ServerLimits, WebSettings


@dataclass
class Running:
    """A server, its port, and what it logged."""

    server: HttpServer
    port: int
    log: list[str] = field(default_factory=list[str])


def greet(request: HttpRequest) -> HttpResponse:
    """Answer anything, with what was asked."""
    return HttpResponse(200, f"{request.path}\n".encode())


@contextmanager
def running(
    handler: Handler = greet,
    settings: WebSettings | None = None,
    limits: ServerLimits | None = None,
    address: str = "127.0.0.1:0",
) -> Generator[Running]:
    """Serve until the end of the block; nothing may be logged that the test does not look at."""
    listeners = listen_on_address(address)
    lines: list[str] = []
    server = HttpServer(handler, listeners, lines.append, settings, limits)
    server.start()
    try:
        yield Running(server, int(listeners[0].getsockname()[1]), lines)
    finally:
        server.stop()
