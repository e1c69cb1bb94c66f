# SPDX-License-Identifier: Apache-2.0
"""A thousand nodes of 8 GPUs into a real Prometheus, on two cores: `make bench-fleet`.

One process plays all nodes (fleet_serve), Prometheus scrapes each every 15 s and evaluates the
rules that gpulock ships; both share the two cores with whatever else runs here. It is Prometheus
itself that is asked afterwards whether it kept up: every scrape of the run, by its own time stamp.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "exporter")]

from tests.bench.fleet_serve import address  # noqa: E402 (the checkout is put on the path first)
from tests.bench.table import print_targets, quantile  # noqa: E402
from tests.exporter.whole import pss_mib  # noqa: E402
from tests.labs.prometheus.lab import Program, Prometheus, shipped  # noqa: E402
from tests.support.scene import folder  # noqa: E402
from tests.support.wait import LabError, wait_until  # noqa: E402

SERVE = Path(__file__).resolve().with_name("fleet_serve.py")
INTERVAL = 15  # seconds between two scrapes of a node, and between two evaluations of the rules
NODES, SECONDS = 1000, 240
CORES = 2
GONE = 1.5  # intervals between two scrapes: one was missed
LATE = 1.0  # seconds beyond the interval
WARM_UP = 2 * INTERVAL
SLOWEST = 5  # rules that are named
JOB = 'job="gpulock"'


class Scrapes(NamedTuple):
    """All scrapes of the run: whether each was good, its seconds, and those between two."""

    up: list[float]
    seconds: list[float]
    gaps: list[float]
    fewest: int  # scrapes of a node


class Cost(NamedTuple):
    """Processor seconds so far, of one process."""

    seconds: float

    @classmethod
    def of(cls, pid: int) -> Cost:
        """Read it."""
        times = psutil.Process(pid).cpu_times()
        return cls(times.user + times.system)


class Server(Prometheus):
    """Prometheus as a site runs it: scrapes and rules every 15 s, its own metrics too."""

    def configuration(self) -> str:
        """Return its configuration."""
        found = json.loads(super().configuration())
        pace = f"{INTERVAL}s"
        found["global"] = {"scrape_interval": pace, "evaluation_interval": pace}
        found["scrape_configs"] += [
            {"job_name": "prometheus", "static_configs": [{"targets": [self.address]}]}
        ]
        return json.dumps(found)

    def series(self, expression: str) -> list[list[tuple[float, float]]]:
        """Return the (time, value) pairs of each series of a range: `up[4m]`."""
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://{self.address}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            result = json.load(answer)["data"]["result"]
        return [[(float(at), float(value)) for at, value in one["values"]] for one in result]

    def rules_by_time(self) -> list[tuple[float, str, str]]:
        """Return seconds, group and name of each rule's last evaluation, the slowest first."""
        with urllib.request.urlopen(f"http://{self.address}/api/v1/rules", timeout=60) as answer:
            groups = json.load(answer)["data"]["groups"]
        found = [
            (float(rule["evaluationTime"]), str(group["name"]), str(rule["name"]))
            for group in groups
            for rule in group["rules"]
        ]
        return sorted(found, reverse=True)

    def most(self, expression: str) -> float:
        """Return the highest value that an expression gives, NaN for none."""
        return max((one.value for one in self.query(expression)), default=float("nan"))


class Fleet:
    """The process that plays all nodes."""

    def __init__(self, root: Path, nodes: int) -> None:
        self._said = root / "fleet.said"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.targets = [f"{address(n)}:{self.port}" for n in range(nodes)]
        words = [sys.executable, str(SERVE), str(nodes), str(self.port)]
        self._program = Program(words, self._said, dict(os.environ))
        self.pid = self._program.process.pid

    def wait(self) -> None:
        """Wait until it listens; raise LabError where it does not."""

        def ready() -> bool:
            if self._program.process.poll() is not None:
                raise LabError(f"the fleet ended:\n{self._said.read_text()}")
            return '"listening"' in self._said.read_text()

        wait_until(ready, why="the fleet")

    def end(self) -> dict[str, float]:
        """End it; return what it counted."""
        self._program.end()
        last = self._said.read_text().splitlines()[-1:]
        return dict(json.loads(last[0])) if last and last[0].startswith("{") else {}


@contextmanager
def two_cores() -> Generator[int]:
    """Keep this process and all that it starts on two cores; give how many there are."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:CORES])
    try:
        yield min(CORES, len(before))
    finally:
        os.sched_setaffinity(0, before)


def scrapes_of(server: Server, seconds: int) -> Scrapes:
    """Return all scrapes of the last `seconds`."""
    window = f"[{seconds}s]"
    up = server.series(f"up{{{JOB}}}{window}")
    spent = server.series(f"scrape_duration_seconds{{{JOB}}}{window}")
    return Scrapes(
        [value for one in up for _, value in one],
        [value for one in spent for _, value in one],
        [later[0] - earlier[0] for one in up for earlier, later in zip(one, one[1:])],
        min((len(one) for one in up), default=0),
    )


def measure(root: Path, nodes: int, seconds: int) -> bool:
    """Measure, print; return whether Prometheus kept up."""
    fleet = Fleet(root, nodes)
    try:
        fleet.wait()
        with Server(root, {"gpulock": fleet.targets}, shipped()) as server:
            pid = next(one.pid for one in psutil.Process().children() if one.name() == "prometheus")
            server.wait(f"up{{{JOB}}} == 1", series=nodes)
            time.sleep(WARM_UP)
            before = [Cost.of(one) for one in (pid, fleet.pid)]
            began, loads = time.monotonic(), [os.getloadavg()[0]]
            while time.monotonic() - began < seconds:
                time.sleep(min(INTERVAL, seconds))
                loads.append(os.getloadavg()[0])
            passed = time.monotonic() - began
            cores = [
                (Cost.of(one).seconds - past.seconds) / passed
                for one, past in zip((pid, fleet.pid), before)
            ]
            memory = [pss_mib(one) for one in (pid, fleet.pid)]
            met = report(server, scrapes_of(server, seconds), nodes, seconds)
            print_cost(cores, memory, loads)
    finally:
        counted = fleet.end()
    print_fleet(counted)
    return met


def report(server: Server, found: Scrapes, nodes: int, seconds: int) -> bool:
    """Print what Prometheus says of the run; return whether it kept up."""
    window = f"[{seconds}s]"
    samples = server.most(f"sum(avg_over_time(scrape_samples_scraped{{{JOB}}}{window}))")
    rate = server.most(f"rate(prometheus_tsdb_head_samples_appended_total{window})")
    kept = 'prometheus_target_interval_length_seconds{{quantile="{}",interval="15s"}}'
    groups = f"prometheus_rule_group_last_duration_seconds{window}"
    # what did not run is a sample less, so each counter is compared with what it was at first
    skipped = server.most(f"sum(increase(prometheus_rule_group_iterations_missed_total{window}))")
    failed = server.most(f"sum(increase(prometheus_rule_evaluation_failures_total{window}))")
    rounds = server.most(f"max_over_time(({groups.partition('[')[0]})[{seconds}s:15s])")
    up = sum(one.value for one in server.query(f"up{{{JOB}}}"))
    missed = sum(gap > GONE * INTERVAL for gap in found.gaps)
    late = sum(INTERVAL + LATE < gap <= GONE * INTERVAL for gap in found.gaps)
    print(f"{nodes} nodes of 8 GPUs every {INTERVAL} s, {seconds} s, rules: all that are shipped")
    rows: Sequence[tuple[str, str]] = (
        ("nodes that are up", f"{up:.0f}"),
        ("scrapes in all / a node at least", f"{len(found.up)} / {found.fewest}"),
        ("scrapes that failed", f"{sum(value != 1 for value in found.up)}"),
        (f"scrapes missed / late by over {LATE:g} s", f"{missed} / {late}"),
        ("a scrape, ms: p50 / p99 / most", three(found.seconds, 1000)),
        ("between two of a node, s: p1 / p99 / most", spread(found.gaps)),
        (
            "the same by Prometheus, s: p1 / p50 / p99",
            " / ".join(f"{server.most(kept.format(q)):.3f}" for q in ("0.01", "0.5", "0.99")),
        ),
        (
            "samples a node / in all / a second",
            f"{samples / nodes:.0f} / {samples:.0f} / {rate:.0f}",
        ),
        ("series in the head", f"{server.most('prometheus_tsdb_head_series'):.0f}"),
        (
            "series that came in these minutes",
            f"{server.most(f'increase(prometheus_tsdb_head_series_created_total{window})'):.0f}",
        ),
        ("rules, slowest group, s", f"{rounds:.2f}"),
        ("rule rounds missed / failed", f"{skipped:.0f} / {failed:.0f}"),
        ("series of alerts", f"{len(server.query('ALERTS'))}"),
    )
    for name, value in rows:
        print(f"  {name:44}{value:>28}")
    print_rules(server.rules_by_time())
    faults = server.faults()
    for fault in faults:
        print(f"  FAULT  {fault}")
    targets = [
        ("nodes that are not up", float(nodes - up), 0.0),
        ("scrapes failed or missed", float(missed + sum(value != 1 for value in found.up)), 0.0),
        ("between two scrapes of a node p99, s", quantile(found.gaps, 0.99), INTERVAL + LATE),
        ("slowest group of rules, s", rounds, float(INTERVAL)),
        ("rule rounds missed or failed", skipped + failed + len(faults), 0.0),
    ]
    print_targets(targets)
    return all(value <= limit for _, value, limit in targets)


def three(values: Sequence[float], scale: float) -> str:
    """Return median, 99th percentile and most."""
    found = (quantile(values, 0.5), quantile(values, 0.99), max(values))
    return " / ".join(f"{scale * value:.1f}" for value in found)


def spread(values: Sequence[float]) -> str:
    """Return what is below nearly all, above nearly all, and most."""
    found = (quantile(values, 0.01), quantile(values, 0.99), max(values))
    return " / ".join(f"{value:.3f}" for value in found)


def print_rules(timed: Sequence[tuple[float, str, str]]) -> None:
    """Print what the last evaluation of each group took, and of the slowest rules."""
    groups: dict[str, float] = {}
    for seconds, group, _ in timed:
        groups[group] = groups.get(group, 0.0) + seconds
    for group, seconds in groups.items():
        print(f"  {f'group {group}, s':44}{seconds:28.2f}")
    for seconds, _, rule in timed[:SLOWEST]:
        print(f"  {f'  {rule}, s':60}{seconds:12.2f}")


def print_cost(cores: Sequence[float], memory: Sequence[float], loads: Sequence[float]) -> None:
    """Print what both processes took; they share two cores with all that runs here."""
    print(f"\n  {'':44}{'Prometheus':>14}{'the fleet':>14}")
    print(f"  {'processor, cores':44}{cores[0]:14.2f}{cores[1]:14.2f}")
    print(f"  {'PSS, MiB':44}{memory[0]:14.0f}{memory[1]:14.0f}")
    text = f"{min(loads):.1f} to {max(loads):.1f}"
    print(f"  {'load average of the whole machine':44}{text:>28}")


def print_fleet(counted: dict[str, float]) -> None:
    """Print what the fleet's side of a scrape costs."""
    scrapes = counted.get("scrapes", 0)
    if scrapes:
        spent = 1000 * counted["seconds"] / scrapes
        print(f"  {'processor a scrape in the fleet, ms':44}{spent:28.2f}")
        print(f"  {'bytes a scrape, gzip':44}{counted['bytes'] / scrapes:28.0f}")


def main() -> int:
    """Measure, print; 0 when Prometheus kept up, 1 when not, 2 when nothing could be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    options = parser.parse_args()
    try:
        with two_cores() as cores, folder("bench-fleet") as root:
            print(f"on {cores} cores, which other programs may use too")
            return 0 if measure(root, options.nodes, options.seconds) else 1
    except (LabError, OSError, subprocess.SubprocessError) as fault:
        print(f"bench: cannot measure: {fault}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
