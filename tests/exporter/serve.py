# SPDX-License-Identifier: Apache-2.0
"""A process that serves as the exporter does, with made-up metrics: what the load tests attack.

Usage: serve.py [--config FILE] [--listen ADDRESS]... [--limit NAME=NUMBER]...
Writes the port it listens on as its first line.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

from gpulock_exporter.web.http import HttpRequest, HttpResponse, SampleBody, route_by_path
from gpulock_exporter.web.listen import Listening
from gpulock_exporter.web.server import HttpServer, ServerLimits, WebSettings


def made_up() -> bytes:
    """Write about 100 kB, different each time, as a new sample is."""
    lines = [
        f'gpulock_gpu_made_up_ratio{{gpu="{n}",uuid="GPU-{n * 7919:032x}"}} {time.time() + n}'
        for n in range(1000)
    ]
    return "\n".join([*lines, ""]).encode()


class Samples:
    """A new sample each second, as the exporter has."""

    def __init__(self) -> None:
        self._body = SampleBody(made_up)
        self._taken_at = time.monotonic()

    def metrics(self, request: HttpRequest) -> HttpResponse:
        """Answer a scrape."""
        if time.monotonic() - self._taken_at > 1:
            self._body, self._taken_at = SampleBody(made_up), time.monotonic()
        return self._body.response(request)


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--listen", action="append", default=[])
    parser.add_argument("--limit", action="append", default=[])
    options = parser.parse_args(arguments)
    pairs = (text.split("=") for text in options.limit)
    limits = ServerLimits(**{name: int(value) for name, value in pairs})

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    settings = WebSettings()
    if options.config:
        from gpulock_exporter.webconfig.config import load_web_config

        settings, _ = load_web_config(options.config)
    listeners = Listening(options.listen or ["127.0.0.1:0"], {}).open()

    large = b"x" * 2_000_000

    def big(_request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, large)

    table = {"/metrics": Samples().metrics, "/big": big}
    server = HttpServer(route_by_path(table), listeners, log, settings, limits)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any thread begins
    server.start()
    print(listeners[0].getsockname()[1], flush=True)
    signal.sigwait({signal.SIGTERM})
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
