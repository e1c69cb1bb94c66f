# SPDX-License-Identifier: Apache-2.0
"""A server in the test's own process, on loopback."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpulock_exporter.web.listen import listen, parse_address
from gpulock_exporter.web.response import Handler, Request, Response
from gpulock_exporter.web.server import Server
from gpulock_exporter.web.server_settings import Limits, WebSettings


@dataclass
class Running:
    """A server, its port, and what it logged."""

    server: Server
    port: int
    log: list[str] = field(default_factory=list[str])


def greet(request: Request) -> Response:
    """Answer anything, with what was asked."""
    return Response(200, f"{request.method} {request.path}\n".encode())


@contextmanager
def running(
    handler: Handler = greet,
    settings: WebSettings | None = None,
    limits: Limits | None = None,
    address: str = "127.0.0.1:0",
) -> Generator[Running]:
    """Serve until the end of the block; nothing may be logged that the test does not look at."""
    listeners = listen([parse_address(address)])
    lines: list[str] = []
    server = Server(handler, listeners, lines.append, settings, limits)
    server.start()
    try:
        yield Running(server, int(listeners[0].getsockname()[1]), lines)
    finally:
        server.stop()
