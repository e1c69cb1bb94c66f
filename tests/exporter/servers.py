# SPDX-License-Identifier: Apache-2.0
"""Servers on loopback, in the test's own process or one of their own, and clients of them.

A polite client, and bytes on a socket without an HTTP library, for those that are not.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gpulock_exporter.web.http import Handler, HttpRequest, HttpResponse, SampleBody, route_by_path
from gpulock_exporter.web.listen import listen_on_address
from gpulock_exporter.web.server import HttpServer, ServerLimits, WebSettings
from gpulock_exporter.web.webconfig import load_web_config

SOUND = b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n"


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        """Return the body as text."""
        return self.body.decode()


def fetch(
    port: int,
    path: str = "/metrics",
    headers: Mapping[str, str] | None = None,
    *,
    context: ssl.SSLContext | None = None,
    method: str = "GET",
    source: str = "",
    seconds: float = 60.0,
) -> Answer:
    """Ask on a connection of its own; raise OSError where nothing listens."""
    # Port 0 is bound only for a source: the kernel gives it such ports as servers get, and
    # keeps them for a minute after the client has closed (TIME_WAIT).
    own = (source, 0) if source else None
    connection = http.client.HTTPConnection("127.0.0.1", port, seconds, source_address=own)
    try:
        connection.connect()
        if context is not None:
            connection.sock = context.wrap_socket(connection.sock, server_hostname="127.0.0.1")
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def as_user(user: str, password: str) -> dict[str, str]:
    """Return the header by which a user is known."""
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


def dial(port: int, context: ssl.SSLContext | None = None, buffer: int = 0) -> socket.socket:
    """Connect; with a context, do the handshake too; with a buffer, hold no more than that."""
    raw = socket.socket()
    try:
        raw.settimeout(60)
        if buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        raw.connect(("127.0.0.1", port))
        if context is None:
            return raw
        return context.wrap_socket(raw, server_hostname="127.0.0.1")
    except BaseException:
        raw.close()
        raise


def dial_many(port: int, context: ssl.SSLContext | None, count: int) -> list[socket.socket]:
    """Connect so often; leave out those for which no place came free in time."""
    found: list[socket.socket] = []
    for _ in range(count):
        with suppress(OSError):
            found.append(dial(port, context))
    return found


def is_gone(one: socket.socket) -> bool:
    """Tell whether the server has ended a connection on which nothing more is expected."""
    poll = select.poll()  # select(2) knows no descriptor above 1023
    poll.register(one, select.POLLIN)
    if not poll.poll(0):
        return False
    one.settimeout(0.05)
    try:
        while one.recv(65536):
            pass
    except socket.timeout:  # TimeoutError from Python 3.10 on
        return False
    except OSError:
        return True
    return True


def left_open(connections: Iterable[socket.socket]) -> int:
    """Count those that the server has not ended."""
    return sum(not is_gone(one) for one in connections)


def exchange(one: socket.socket, data: bytes, seconds: float = 30.0) -> tuple[bytes, bool]:
    """Send bytes; return all that comes back, and whether the server then closed."""
    one.settimeout(seconds)
    try:
        one.sendall(data)
    except OSError:
        pass  # it has heard enough; its answer may still be there
    received = b""
    while True:
        try:
            part = one.recv(65536)
        except socket.timeout:  # TimeoutError from Python 3.10 on
            return received, False
        except OSError:
            return received, True
        if not part:
            return received, True
        received += part


ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'exporter'}:{ROOT}", "PATH": "/usr/bin:/bin"}
LINES, LARGE = 1000, 2_000_000  # of /metrics; bytes of /big


@dataclass
class Running:
    """A server of this process, its port, and what it logged."""

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
) -> Generator[Running]:
    """Serve until the end of the block."""
    listeners = listen_on_address("127.0.0.1:0")
    lines: list[str] = []
    server = HttpServer(handler, listeners, lines.append, settings, limits)
    server.start()
    try:
        yield Running(server, int(listeners[0].getsockname()[1]), lines)
    finally:
        server.stop()


@dataclass(frozen=True)
class Child:
    """A serving process, and how to talk to it."""

    process: subprocess.Popen[str]
    port: int
    client: ssl.SSLContext | None
    errors: Path
    at_rest: int  # sockets before its first client

    def get(self, headers: Mapping[str, str] | None = None, source: str = "") -> Answer:
        """Scrape on a connection of its own."""
        return fetch(self.port, headers=headers, context=self.client, source=source, seconds=100)

    def scrape(self, headers: Mapping[str, str] | None = None, source: str = "") -> None:
        """Scrape on a connection of its own; expect a whole answer."""
        answer = self.get(headers, source)
        assert (answer.status, answer.body.count(b"\n")) == (200, LINES), answer.body

    def sockets(self) -> int:
        """Return how many sockets the process has."""
        return count_sockets(self.process.pid)


def count_sockets(pid: int) -> int:
    """Return how many sockets a process has."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(descriptor).startswith("socket:")
    return count


@contextmanager
def serving(
    folder: Path,
    config: Path | None = None,
    *,
    client: ssl.SSLContext | None = None,
    descriptors: int = 0,
    **limits: int,
) -> Generator[Child]:
    """Start a server, with so many descriptors where they are few, and end it; it must end well."""
    errors = folder / "stderr"
    words = json.dumps([str(config or ""), descriptors, limits])
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__, words],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=ENVIRONMENT,
        )
    with process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first, errors.read_text()
            yield Child(process, int(first), client, errors, count_sockets(process.pid))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, errors.read_text()
        finally:
            process.kill()
    assert "Traceback" not in errors.read_text()


def main(config: str, descriptors: int, limits: dict[str, int]) -> None:
    """Serve until SIGTERM; write the port as the first line."""
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any thread begins
    settings = load_web_config(config)[0] if config else None
    sample = SampleBody(lambda: b'gpulock_gpu_made_up_ratio{gpu="0",uuid="GPU-0"} 0.5\n' * LINES)
    big = HttpResponse(200, b"x" * LARGE)
    handler = route_by_path({"/metrics": sample.response, "/big": lambda _: big})
    with running(handler, settings, ServerLimits(**limits)) as server:
        print(server.port, flush=True)
        signal.sigwait({signal.SIGTERM})
        sys.stderr.writelines(f"{line}\n" for line in server.log)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
