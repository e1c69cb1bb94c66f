# SPDX-License-Identifier: Apache-2.0
"""Scrapes of the exporter beside a crowd: 1,000 idle connections, 600 slow writers, 600 readers.

The crowd is a process of its own. Where the exporter ends one of its connections it comes again, so
that it never gets smaller.
"""

from __future__ import annotations

import http.client
import ssl
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.exporter.certificates import trusting
from tests.exporter.wire import SOUND, dial, is_gone

IDLE, WRITERS, READERS = 1000, 600, 600
SCRAPES, GAP = 200, 0.1  # seconds between two


def be_a_crowd(port: int, client: ssl.SSLContext) -> None:
    """Hold connections of each kind, and renew those that end, until killed."""
    kinds = "i" * IDLE + "w" * WRITERS + "r" * READERS
    held: list[ssl.SSLSocket | None] = [None] * len(kinds)
    says_ready = True
    while True:
        for place, kind in enumerate(kinds):
            with suppress(OSError):
                held[place] = go_on(held[place], kind, port, client)
        if says_ready:
            print("ready", flush=True)
        says_ready = False


def go_on(one: ssl.SSLSocket | None, kind: str, port: int, client: ssl.SSLContext) -> ssl.SSLSocket:
    """Do as its kind does: nothing, write a byte, read a byte; dial where it has ended."""
    if one is not None and kind != "r" and not is_gone(one):
        if kind == "w":
            one.sendall(b"G")
        return one
    if one is not None and kind == "r":
        one.settimeout(0.0005)
        try:
            if one.recv(1):
                return one
        except TimeoutError:
            return one
        except OSError:
            pass
    if one is not None:
        one.close()
    new = dial(port, client)
    assert isinstance(new, ssl.SSLSocket)
    if kind == "r":
        new.sendall(SOUND)
    return new


@contextmanager
def crowd(port: int, authority: Path) -> Generator[None]:
    """Have the crowd connected."""
    words = [sys.executable, "-m", "tests.bench.crowd", str(port), str(authority)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def scrapes_beside(port: int, authority: Path, headers: dict[str, str]) -> list[float]:
    """Return the milliseconds of scrapes beside the crowd; raise OSError where one fails."""
    client = trusting(authority)
    taken: list[float] = []
    with crowd(port, authority):
        for _ in range(SCRAPES):
            began = time.perf_counter()
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=client)
            connection.request("GET", "/metrics", headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK or not answer.read():
                raise OSError(f"a scrape was answered with {answer.status}")
            connection.close()
            taken.append((time.perf_counter() - began) * 1000)
            time.sleep(GAP)
    return taken


if __name__ == "__main__":
    be_a_crowd(int(sys.argv[1]), trusting(Path(sys.argv[2])))
