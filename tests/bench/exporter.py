# SPDX-License-Identifier: Apache-2.0
"""Measure gpulock-exporter on the NVML double of eight H200: `make bench-exporter`.

It is asked as Prometheus asks. The first scrape of each second is the one that renders; the others
are served from memory. Meanwhile every card draws, heats, clocks and transfers something else twice
a second. Processor time is printed whole, and without what the double itself takes of it.
"""

from __future__ import annotations

import http.client
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.crowd import scrapes_beside
from tests.bench.harness import (
    Target,
    median,
    print_rows,
    processor_seconds,
    quantile,
    run_bench,
)
from tests.exporter.certificates import (
    make_authority,
    make_certificate,
    trusting,
    write_web_config,
)
from tests.exporter.whole import Whole
from tests.nvml.double import Double

HEADERS = {  # what Prometheus 2.42 sends
    "User-Agent": "Prometheus/2.42.0",
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
    "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}
SECONDS = 20.0  # of each round of scrapes
REST = 60.0  # seconds over which processor time is counted
GAP = 0.004  # seconds between two scrapes
GPUS = 8
CHANGE = 0.5  # seconds after which each card at work has other values
RANGES = {
    "temperature": (40, 80),
    "temperature.memory": (45, 90),
    "power": (200_000, 700_000),
    "power.instant": (200_000, 700_000),
    "memory.used": (2**30, 2**36),
    "clock.sm": (1000, 1980),
    "utilization.memory": (10, 90),
}


class Client:
    """One connection that is kept where the server keeps it, as Prometheus keeps its own."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def scrape(self) -> bytes:
        """Return the body of one scrape."""
        self._connection.request("GET", "/metrics", headers=HEADERS)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"a scrape was answered with {answer.status}")
        return body


def scrapes(port: int, seconds: float = SECONDS) -> tuple[list[float], list[float]]:
    """Return the milliseconds of scrapes that found a new body, and of those that did not."""
    client = Client(port)
    fresh: list[float] = []
    same: list[float] = []
    last = client.scrape()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        body = client.scrape()
        (same if body == last else fresh).append((time.perf_counter() - began) * 1000)
        last = body
        time.sleep(GAP)
    return fresh, same


@contextmanager
def changing(nvml: Double) -> Generator[None]:
    """Have every card draw, heat, clock and transfer something else twice a second, as at work."""
    stop, chance = threading.Event(), random.Random(1)

    def change() -> None:
        while not stop.wait(CHANGE):
            values = {
                f"gpu{gpu}.{name}": chance.randrange(*among)
                for gpu in range(GPUS)
                for name, among in RANGES.items()
            }
            nvml.update(values)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def percent_of_a_core(read_seconds: Callable[[], list[float]]) -> list[float]:
    """Return what each counter of processor seconds grows by meanwhile, in percent."""
    before, began = read_seconds(), time.monotonic()
    time.sleep(REST)
    passed = time.monotonic() - began
    return [100 * (now - then) / passed for then, now in zip(before, read_seconds())]


def measure_plain(root: Path, nvml: Double) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the milliseconds of our scrapes, and shares of a core in percent."""
    with Whole(root, nvml) as exporter:
        exporter.up(GPUS)
        with changing(nvml):
            fresh, same = scrapes(exporter.port)
        everything = ",".join(map(str, range(GPUS)))
        exporter.gpulock("claim", "--devices", everything, "--pid", str(os.getpid()))
        pids = [exporter.process.pid, *(worker.pid for worker in exporter.workers())]
        whole, double = percent_of_a_core(
            lambda: [processor_seconds(pids), nvml.processor_seconds()]
        )
        nvml.hang("nvmlDeviceGetUtilizationRates", "deaf")
        hung = [value for kind in scrapes(exporter.port) for value in kind]
    rows = {"scrape, rendered": fresh, "scrape, cached": same, "scrape while NVML hangs": hung}
    return rows, {"whole": whole, "the double": double, "free NVML": whole - double}


def measure_tls(root: Path, nvml: Double) -> tuple[list[float], float, float]:
    """Return the milliseconds of scrapes over TLS beside a crowd, and MiB of memory before, in it.

    The memory is that of exporter and worker.
    """
    authority = make_authority(root, "authority")
    make_certificate(root, "server", authority)
    config = write_web_config(root, authority)
    client = trusting(authority)
    keys = {"WEB_CONFIG": str(config)}
    with Whole(root, nvml, settings=keys, client=client) as exporter:
        exporter.up(GPUS)
        for _ in range(60):
            exporter.scrape()
        before = exporter.pss_mib()
        beside = scrapes_beside(exporter.port, authority, HEADERS)
        return beside, before, exporter.pss_mib()


def measure(root: Path) -> list[Target]:
    """Measure, and print; return the targets."""
    for name in ("plain", "tls"):
        (root / name).mkdir()
    with Double(root / "nvml", preset="dgx-h200") as nvml:
        for gpu in range(GPUS):
            nvml.load(gpu, 50 + gpu)
        rows, shares = measure_plain(root / "plain", nvml)
        rows["scrape over TLS beside 2,200"], pss, crowded = measure_tls(root / "tls", nvml)
    print_rows("scrapes, 8 GPUs", rows)
    print("\nboth processes, 8 GPUs that are held and at work, one look a second")
    print(f"  PSS, MiB: with TLS {pss:.1f}, after a crowd {crowded:.1f}")
    print(f"  % of a core: {', '.join(f'{name} {share:.2f}' for name, share in shares.items())}")
    rendered = median(rows["scrape, rendered"])
    return [
        Target("scrape, cached, ms", median(rows["scrape, cached"]), 2.0),
        Target("scrape, rendered, ms", rendered, 10.0),
        Target("while NVML hangs, p99, ms", quantile(rows["scrape while NVML hangs"], 0.99), 20.0),
        Target(
            "beside 2,200, p99, ms", quantile(rows["scrape over TLS beside 2,200"], 0.99), 400.0
        ),
        Target("PSS, MiB", pss, 40.0),
        Target("processor with a free NVML, % of a core", shares["free NVML"], 0.5),
    ]


if __name__ == "__main__":
    sys.exit(run_bench("exporter", measure))
