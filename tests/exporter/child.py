# SPDX-License-Identifier: Apache-2.0
"""A server in a process of its own, so that its memory and its end can be seen."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "tests" / "exporter" / "serve.py"
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'exporter'}:{ROOT}", "PATH": "/usr/bin:/bin"}


@dataclass(frozen=True)
class Child:
    """A serving process, and how to talk to it."""

    process: subprocess.Popen[str]
    port: int
    client: ssl.SSLContext | None
    errors: Path
    at_rest: int  # sockets before its first client

    def connect(self, source: str = "", timeout: float = 100) -> http.client.HTTPConnection:
        """Return a new connection to it, not connected yet."""
        # Port 0 is bound only for a source: the kernel gives it such ports as servers get, and
        # keeps them for a minute after the client has closed (TIME_WAIT).
        address = (source, 0) if source else None
        if self.client is None:
            return http.client.HTTPConnection(
                "127.0.0.1", self.port, timeout=timeout, source_address=address
            )
        return http.client.HTTPSConnection(
            "127.0.0.1",
            self.port,
            timeout=timeout,
            source_address=address,
            context=self.client,
        )

    def get(
        self, path: str, headers: Mapping[str, str] | None = None, source: str = ""
    ) -> tuple[int, bytes]:
        """Get a page on a connection of its own."""
        connection = self.connect(source)
        try:
            connection.request("GET", path, headers=dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def scrape(self, headers: Mapping[str, str] | None = None, source: str = "") -> None:
        """Scrape on a connection of its own; expect a whole answer."""
        status, body = self.get("/metrics", headers, source)
        assert status == 200, body
        assert body.count(b"\n") >= 999

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
    *options: str,
    client: ssl.SSLContext | None = None,
    starter: Sequence[str] = (),
) -> Generator[Child]:
    """Start a server, and end it; it must end well."""
    errors = folder / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*starter, sys.executable, str(SERVE), *options],
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
