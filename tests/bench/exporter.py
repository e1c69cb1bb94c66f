# SPDX-License-Identifier: Apache-2.0
"""Measure gpulock-exporter on the NVML double of eight H200: `make bench-exporter`.

It is asked as Prometheus asks. The first scrape of each second is the one that renders; the others
are served from memory. Meanwhile every card draws, heats and clocks something else twice a second.
Processor time is that of the double, too.
"""

from __future__ import annotations

import http.client
import os
import random
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.harness import Target, median, quantile, run_bench
from tests.exporter.whole import Whole, pss_mib
from tests.nvml.double import Double

HEADERS = {"Accept": "text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "Accept-Encoding": "gzip"}
SECONDS = 20.0  # of each round of scrapes
REST = 60.0  # seconds over which processor time is counted
GAP = 0.004  # seconds between two scrapes
GPUS = 8
CHANGE = 0.5  # seconds after which each card at work has other values
SCHED_CLOCK = 2  # CPUCLOCK_SCHED of the kernel's posix-timers.h, in nanoseconds
RANGES = {
    "temperature": (40, 80),
    "power": (200_000, 700_000),
    "memory.used": (2**30, 2**36),
    "clock.sm": (1000, 1980),
    "utilization.memory": (10, 90),
}


def scrape(port: int) -> bytes:
    """Return the body of one scrape, by a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics", headers=HEADERS)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != http.client.OK:
        raise RuntimeError(f"a scrape was answered with {answer.status}")
    return body


def scrapes(port: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of scrapes that found a new body, and of those that did not."""
    fresh: list[float] = []
    same: list[float] = []
    last = scrape(port)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        began = time.perf_counter()
        body = scrape(port)
        (same if body == last else fresh).append((time.perf_counter() - began) * 1000)
        last = body
        time.sleep(GAP)
    return fresh, same


@contextmanager
def changing(nvml: Double) -> Generator[None]:
    """Have every card draw, heat and clock something else twice a second, as at work."""
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


def processor_seconds(pids: list[int]) -> float:
    """Return the processor time of processes so far, by clock_getcpuclockid(3)."""
    return sum(time.clock_gettime((~pid << 3) | SCHED_CLOCK) for pid in pids)


def measure(root: Path) -> list[Target]:
    """Measure scrapes, memory and processor time; return the targets."""
    with (
        Double(root / "nvml", preset="dgx-h200") as nvml,
        Whole(root, nvml) as exporter,
    ):
        for gpu in range(GPUS):
            nvml.load(gpu, 50 + gpu)
        exporter.up(GPUS)
        with changing(nvml):
            fresh, same = scrapes(exporter.port)
        everything = ",".join(map(str, range(GPUS)))
        exporter.gpulock("claim", "--devices", everything, "--pid", str(os.getpid()))
        pids = [exporter.process.pid, *(worker.pid for worker in exporter.workers())]
        before, began = processor_seconds(pids), time.monotonic()
        time.sleep(REST)
        share = 100 * (processor_seconds(pids) - before) / (time.monotonic() - began)
        memory = sum(map(pss_mib, pids))
        nvml.hang("nvmlDeviceGetUtilizationRates", "deaf")
        hung = [value for kind in scrapes(exporter.port) for value in kind]
    return [
        Target("scrape, cached, ms", median(same), 2.0),
        Target("scrape, rendered, ms", median(fresh), 10.0),
        Target("while NVML hangs, p99, ms", quantile(hung, 0.99), 20.0),
        Target("PSS of both processes, MiB", memory, 40.0),
        Target("processor time of both, % of a core", share, 0.5),
    ]


if __name__ == "__main__":
    sys.exit(run_bench("exporter", measure))
