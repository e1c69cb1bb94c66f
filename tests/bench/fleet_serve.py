# SPDX-License-Identifier: Apache-2.0
"""One process that is a thousand exporters: `fleet_serve.py NODES PORT`, until SIGTERM.

Each node has an address of its own in 127.64.0.0/10, so that Prometheus keeps a connection to
each; the server is the exporter's, and finds the node by the header Host. It prints one line of
JSON once it listens, and one with what its scrapes cost when it ends.
"""

from __future__ import annotations

import itertools
import json
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "exporter")]

from gpulock_exporter.clock import SystemClock  # noqa: E402 (the checkout is put on the path first)
from gpulock_exporter.web.http import HttpRequest, HttpResponse, error_response  # noqa: E402
from gpulock_exporter.web.listen import ListenAddress, listen_on_addresses  # noqa: E402
from gpulock_exporter.web.negotiation import negotiated_response  # noqa: E402
from gpulock_exporter.web.serve import ServerLimits  # noqa: E402
from gpulock_exporter.web.server import HttpServer  # noqa: E402

from tests.bench.fleet_node import FleetNode, boot, hardware  # noqa: E402

A_NET = 250  # nodes
FILES = 4  # descriptors a node: a listener, a connection, and room for one that is replaced


def address(number: int) -> str:
    """Return the address of a node; all of 127.0.0.0/8 is this machine."""
    return f"127.64.{number // A_NET}.{1 + number % A_NET}"


class Fleet:
    """All nodes by their addresses; what the scrapes took is counted."""

    def __init__(self, nodes: Mapping[str, FleetNode]) -> None:
        self._nodes = nodes
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self.scrapes, self.bytes, self.seconds = 0, 0, 0.0

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer a scrape of a node."""
        node = self._nodes.get(request.headers.get("host", "").partition(":")[0])
        if node is None or request.path != "/metrics":
            return error_response(404, "a node has /metrics, and each node its own address")
        began = time.thread_time()
        answer = negotiated_response(request, node.look(self._clock.now()))
        with self._lock:
            self.scrapes += 1
            self.bytes += len(answer.body)
            self.seconds += time.thread_time() - began
        return answer


def serve(nodes: int, port: int, say: Callable[[str], None]) -> None:
    """Be a fleet until SIGTERM."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, FILES * nodes + 100), hard))
    stopped = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    machine, numbers, now = boot(), itertools.count(1_000_000), SystemClock().now().boottime
    with tempfile.TemporaryDirectory() as folder:
        here = hardware(Path(folder) / "node")
    fleet = Fleet({address(n): FleetNode(n, here, machine, numbers, now) for n in range(nodes)})
    listeners = listen_on_addresses([ListenAddress(address(n), port) for n in range(nodes)])
    limits = ServerLimits(connections=2 * nodes)
    server = HttpServer(
        fleet.handle, listeners, lambda line: print(line, file=sys.stderr), None, limits
    )
    server.start()
    say(json.dumps({"listening": nodes}))
    stopped.wait()
    server.stop()
    cost = {"scrapes": fleet.scrapes, "bytes": fleet.bytes, "seconds": fleet.seconds}
    say(json.dumps({**cost, **server.counts()}))


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), lambda line: print(line, flush=True))
