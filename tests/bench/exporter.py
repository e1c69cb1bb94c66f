# SPDX-License-Identifier: Apache-2.0
"""Measure gpulock-exporter on the NVML double beside nvitop-exporter: `make bench-exporter`.

Both stand on the same double of eight H200 in the same run, and are asked as Prometheus asks. The
first scrape of each second is the one that renders; the others are served from memory. Meanwhile
every card draws, heats, clocks and transfers something else twice a second. Processor
time is told whole, and without what the double itself takes: see nvml_free.
"""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "exporter")]

from gpulock_exporter.metrics.devices import (  # noqa: E402 (the checkout is put on the path first)
    collect_families,
)
from gpulock_exporter.metrics.exposition import render_exposition  # noqa: E402
from gpulock_exporter.metrics.labels import LabelUser  # noqa: E402
from gpulock_exporter.web.negotiation import gzip_body  # noqa: E402

from tests.bench.nvml_free import bare, calls_a_second, check_alike, shares  # noqa: E402
from tests.bench.table import print_inside, print_targets, quantile  # noqa: E402
from tests.exporter.certificates import make_authority, make_certificate, trusting  # noqa: E402
from tests.exporter.whole import Whole, pss_mib  # noqa: E402
from tests.nvml.double import Double  # noqa: E402
from tests.support.exporter_nodes import Node, full_card, instance  # noqa: E402
from tests.support.scene import folder  # noqa: E402

PEER = ("nvitop==1.7.2", "nvitop-exporter==1.7.2", "nvidia-ml-py<13.591")
HEADERS = {  # what Prometheus 2.42 sends
    "User-Agent": "Prometheus/2.42.0",
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
    "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}
SECONDS = 20.0  # of each round
CHANGE = 0.5  # seconds after which each card at work has other values
REST, RESTS = 12.0, 5  # seconds over which processor time is counted, how often: the median counts
GAP = 0.004  # seconds between two scrapes
GPUS = 8


class Client:
    """One connection that is kept, as Prometheus keeps its own."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def scrape(self) -> tuple[float, bytes]:
        """Return milliseconds and body of one scrape."""
        began = time.perf_counter()
        self._connection.request("GET", "/metrics", headers=HEADERS)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"a scrape was answered with {answer.status}")
        return (time.perf_counter() - began) * 1000, body


def scrapes(port: int, seconds: float = SECONDS) -> tuple[list[float], list[float]]:
    """Return the milliseconds of scrapes that found a new body, and of those that did not."""
    client = Client(port)
    fresh: list[float] = []
    same: list[float] = []
    _, last = client.scrape()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        spent, body = client.scrape()
        (same if body == last else fresh).append(spent)
        last = body
        time.sleep(GAP)
    return fresh, same


def rendering(cards: int, instances: int, rounds: int = 21) -> list[float]:
    """Return the milliseconds it takes to render and compress a node of so many devices."""
    node = Node()
    parts = [instance(c, gi) for c in range(cards if instances else 0) for gi in range(instances)]
    node.tick(*[full_card(c, mig=bool(instances)) for c in range(cards)], *parts)
    found: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        snapshot = node.snapshot()
        gzip_body(render_exposition(collect_families(snapshot, LabelUser.NAME), True, frozenset()))
        found.append((time.perf_counter() - began) * 1000)
    return found


def loaded(nvml: Double) -> Double:
    """Return a double whose cards are all at work."""
    for gpu in range(GPUS):
        nvml.load(gpu, 50 + gpu)
    return nvml


@contextmanager
def changing(nvml: Double) -> Generator[None]:
    """Have every card draw, heat, clock and transfer something else twice a second, as at work."""
    stop, chance = threading.Event(), random.Random(1)
    ranges = {
        "temperature": (40, 80),
        "temperature.memory": (45, 90),
        "power": (200_000, 700_000),
        "power.instant": (200_000, 700_000),
        "memory.used": (2**30, 2**36),
        "clock.sm": (1000, 1980),
        "utilization.memory": (10, 90),
        "pcie.tx_rate": (1000, 9000),
        "pcie.rx_rate": (1000, 9000),
    }

    def change() -> None:
        while not stop.wait(CHANGE):
            nvml.update(
                {
                    f"gpu{gpu}.{name}": chance.randrange(*among)
                    for gpu in range(GPUS)
                    for name, among in ranges.items()
                }
            )

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def spend(root: Path, exporter: Whole, nvml: Double) -> tuple[dict[str, float], dict[str, float]]:
    """Return shares of a core in percent, medians taken in one run; and NVML calls a second.

    `ours` is the exporter, `double` what the double itself takes of that.
    """
    with Double(root / "bare", preset="dgx-h200") as other, bare(root, loaded(other)) as pids:
        calls, woken = pids
        own = [exporter.process.pid, *(worker.pid for worker in exporter.workers())]
        groups = {"ours": own, "calls": [calls], "woken": [woken]}
        found: dict[str, list[float]] = {}
        theirs: dict[str, float] = {}

        def rest() -> None:
            found.update(shares(groups, REST, RESTS))

        ours = calls_a_second(nvml, lambda: theirs.update(calls_a_second(other, rest)))
        check_alike(ours, theirs)
    middle = {name: quantile(values, 0.5) for name, values in found.items()}
    return {"ours": middle["ours"], "double": middle["calls"] - middle["woken"]}, ours


@contextmanager
def peer(root: Path, env: Mapping[str, str]) -> Generator[tuple[int, int]]:
    """Start nvitop-exporter on the double; give its port and pid."""
    place = root / "peer"
    venv.create(place, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin/python3"), "install", "-q"]
    subprocess.run([*pip, *PEER], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    words = ["--hostname", "127.0.0.1", "--port", str(port), "--interval", "1"]
    with (root / "peer.log").open("wb") as log:
        process = subprocess.Popen(
            [str(place / "bin/nvitop-exporter"), *words],
            env={**os.environ, **env},
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(port, process)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(10)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers; raise RuntimeError where it ends instead."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}")
        try:
            Client(port).scrape()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("it never answered")


def measure(root: Path) -> None:
    """Measure both, and print."""
    for name in ("plain", "tls"):
        (root / name).mkdir()
    with Double(root / "nvml", preset="dgx-h200") as nvml:
        loaded(nvml)
        figures: dict[str, float] = {}
        with Whole(root / "plain", nvml) as exporter:
            exporter.up(GPUS)
            with changing(nvml):
                fresh, same = scrapes(exporter.port)
            ours = {"scrape, rendered": fresh, "scrape, cached": same}
            everything = ",".join(map(str, range(GPUS)))
            exporter.gpulock("claim", "--devices", everything, "--pid", str(os.getpid()))
            cpu, calls = spend(root, exporter, nvml)
            nvml.hang("nvmlDeviceGetUtilizationRates", "deaf")
            hung = [value for part in scrapes(exporter.port, 30.0) for value in part]
            ours["scrape while NVML hangs"] = hung
            nvml.reset()
        authority = make_authority(root, "authority")
        own = make_certificate(root, "server", authority)
        config = root / "web.yml"
        lines = [
            "tls_server_config:",
            f"  cert_file: {own}",
            f"  key_file: {own.with_suffix('.key')}",
        ]
        config.write_text("\n".join(lines) + "\n")
        tls = trusting(authority)
        with Whole(root / "tls", nvml, "--web-config", str(config), client=tls) as exporter:
            exporter.up(GPUS)
            for _ in range(60):
                exporter.scrape()
            figures["pss"] = exporter.pss_mib()
        with peer(root, nvml.env) as (port, pid):
            time.sleep(5)
            with changing(nvml):
                fresh, same = scrapes(port)
            theirs = {"nvitop-exporter": fresh + same}
            figures["peer pss"] = pss_mib(pid)
            figures["peer cpu"] = quantile(shares({"peer": [pid]}, REST, RESTS)["peer"], 0.5)
    mig, free = rendering(16, 8), cpu["ours"] - cpu["double"]
    print_inside("scrapes on one connection, 8 GPUs", {**ours, **theirs})
    print_inside("rendered within the process", {"8 GPUs": rendering(8, 0), "128 MIG devices": mig})
    print("\nboth processes, 8 GPUs that are held and at work, one look a second")
    print("                                                     gpulock  nvitop-exporter")
    print(f"  PSS, MiB (ours with TLS)                      {figures['pss']:12.1f}", end="")
    print(f"{figures['peer pss']:17.1f}")
    print(f"  processor, % of a core                        {cpu['ours']:12.2f}", end="")
    print(f"{figures['peer cpu']:17.2f}")
    print(f"    of which the double itself takes            {cpu['double']:12.2f}")
    print(f"    left with an NVML that costs nothing        {free:12.2f}")
    print("  The double's part is what a process in C takes beside it, for the same calls alone.")
    print(f"\nNVML calls a second: {sum(calls.values()):.0f}")
    for name, count in sorted(calls.items(), key=lambda pair: -pair[1]):
        print(f"  {count:8.1f}  {name}")
    middle, rendered = (
        quantile(rows, 0.5) for rows in (theirs["nvitop-exporter"], ours["scrape, rendered"])
    )
    print_targets(
        [
            ("scrape, cached p50, ms", quantile(ours["scrape, cached"], 0.5), 1.0),
            ("scrape, rendered p50, ms", rendered, 6.0),
            ("128 MIG devices rendered p50, ms", quantile(mig, 0.5), 40.0),
            ("scrape, rendered / nvitop-exporter", rendered / middle, 1.0),
            ("scrape while NVML hangs p99, ms", quantile(hung, 0.99), 20.0),
            ("PSS, MiB", figures["pss"], 36.0),
            ("processor with a free NVML, % of a core", free, 0.5),
        ]
    )


def main() -> int:
    """Measure, print, return the exit code."""
    try:
        with folder("bench-exporter") as root:
            measure(root)
    except (RuntimeError, OSError, subprocess.SubprocessError) as fault:
        print(f"bench: cannot measure: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
