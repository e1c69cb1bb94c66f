# SPDX-License-Identifier: Apache-2.0
"""What a server is told: its limits, and what web-config.yml asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulock_exporter.web.response import Headers, HttpRequest, HttpResponse

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How much and how long a client may; each deadline is for the whole of that phase."""

    connections: int = 128  # a TLS connection costs 60-100 KiB: its thread's stack and OpenSSL
    handshake_seconds: float = 5.0
    header_seconds: float = 5.0
    handle_seconds: float = 10.0  # where the client names no timeout: Prometheus's default
    write_seconds: float = 10.0
    idle_seconds: float = 150.0  # longer than two scrapes a minute apart
    linger_seconds: float = 1.0  # for a client to read why it is refused
    stop_seconds: float = 5.0
    header_bytes: int = 16 * 1024
    header_count: int = 100
    send_buffer_bytes: int = 128 * 1024  # the kernel's, for each connection


def allow_all(_request: HttpRequest) -> HttpResponse | None:
    """Refuse nobody."""
    return None


@dataclass(frozen=True, slots=True)
class WebSettings:
    """What a reload can change: swapped as one object, so that no request sees half of it."""

    tls: ssl.SSLContext | None = None
    headers: Headers = ()  # added to every response
    refusal: Callable[[HttpRequest], HttpResponse | None] = allow_all  # asked before the handler
