# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus on loopback that scrapes real exporters, every second.

    with Prometheus(tmp_path, {"gpulock": ["127.0.0.1:19465"]}, shortened(shipped())) as server:
        server.wait("gpulock:job:gpus:count")

Needs Debian's package prometheus. Everything else lies in the folder given, and each program is
ended by its own pid.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from typing_extensions import Self

from tests.support.evidence import unwatch, watch
from tests.support.ports import ReservedPort
from tests.support.wait import LabError, wait_until

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "exporter" / "rules"
EXPORTER = "from gpulock_exporter.app.program import main; import sys; sys.exit(main())"
GPULOCK = "from gpulock.cli import main; import sys; sys.exit(main())"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"}
# what a test cannot wait for: how long an alert waits, windows, idleness
SHORTER = (
    (re.compile(r"(?m)^(\s+for: )\d+[mh]$"), r"\g<1>2s"),
    (re.compile(r"\[1[05]m\]"), "[8s]"),
    (re.compile(r":15s\]"), ":1s]"),
    (re.compile(r">= 600\b"), ">= 6"),
    (re.compile(r"< 900\b"), "< 20"),
)
_RESERVED: Final[list[ReservedPort]] = []
UNSEEN = "min_over_time(up[3s]) == 0"  # whose series may be missing for that reason alone


class Sample(NamedTuple):
    """One series of an answer, at one moment."""

    labels: dict[str, str]
    value: float


def program(name: str) -> str:
    """Return a program of Debian's package prometheus; raise LabError where there is none."""
    found = shutil.which(name)
    if not found:
        raise LabError(f"this needs {name} of Debian's package prometheus")
    return found


def shipped() -> dict[str, str]:
    """Return the rule files that gpulock ships, by name."""
    return {path.name: path.read_text() for path in sorted(RULES.glob("*.yml"))}


def shortened(rules: Mapping[str, str]) -> dict[str, str]:
    """Return rules that take seconds where those of gpulock take minutes."""
    found = dict(rules)
    for pattern, shorter in SHORTER:
        found = {name: pattern.sub(shorter, text) for name, text in found.items()}
    return found


def free_address() -> str:
    """Return an address on loopback that is kept from others as long as this process lives."""
    _RESERVED.append(ReservedPort())
    return _RESERVED[-1].address


class Program:
    """A program that runs until it is told to end; `log` is what it said."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=dict(env))

    def end(self) -> None:
        """End it, and wait until it has."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def exporter(config: Path, folder: Path, address: str) -> Program:
    """Start the exporter of a node; return once it answers."""
    own = ["--config", str(config), "--folder", str(folder), "--listen", address]
    log = folder.with_suffix(".log")
    found = Program([sys.executable, "-c", EXPORTER, *own], log, ENVIRONMENT)
    wait_until(
        lambda: answers(f"http://{address}/-/healthy"), why=lambda: f"{address}\n{log.read_text()}"
    )
    return found


def gpulock(config: Path, *words: str) -> list[str]:
    """Return the command line of `gpulock` for a node."""
    return [sys.executable, "-c", GPULOCK, "--config", str(config), *words]


def answers(url: str) -> bool:
    """Return whether a server is there."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Prometheus:
    """The server: `targets` by the name of their scrape job, `rules` by the name of their file."""

    def __init__(
        self, folder: Path, targets: Mapping[str, Sequence[str]], rules: Mapping[str, str]
    ) -> None:
        self.folder = folder / "prometheus"
        self.targets = targets
        self.rules = rules
        self.address = free_address()
        self._program: Program

    def __enter__(self) -> Self:
        self.folder.mkdir()
        for name, text in self.rules.items():
            (self.folder / name).write_text(text)
        config = self.folder / "prometheus.yaml"
        config.write_text(self.configuration())
        command = [
            program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address={self.address}",
        ]
        self._program = Program(command, self.folder / "log", {"PATH": "/usr/bin:/bin"})
        watch(self)
        wait_until(lambda: answers(f"http://{self.address}/-/ready"), why="Prometheus to be ready")
        return self

    def __exit__(self, *_: object) -> None:
        unwatch(self)
        self._program.end()

    @property
    def name(self) -> str:
        """Return what a folder of its evidence is called."""
        return "prometheus"

    def log_files(self) -> list[Path]:
        """Return its own log and those of the exporters."""
        return [self.folder / "log", *sorted(self.folder.parent.glob("**/*.log"))]

    def evidence(self) -> dict[str, str]:
        """Return its alerts, and what it scrapes."""
        asked = ("alerts", "targets", "rules")
        return {what: json.dumps(self._get(what), indent=1)[:20000] for what in asked}

    def configuration(self) -> str:
        """Return its configuration, which is JSON and so YAML too."""
        return json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": sorted(self.rules),
                "scrape_configs": [
                    {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                    for job, addresses in self.targets.items()
                ],
            }
        )

    def query(self, expression: str) -> list[Sample]:
        """Return what an expression gives now; raise LabError where it is none."""
        result = self._get("query", query=expression)["result"]
        return [
            Sample(
                {name: text for name, text in one["metric"].items() if name != "__name__"},
                float(one["value"][1]),
            )
            for one in result
        ]

    def value(self, expression: str) -> float | None:
        """Return the one value that an expression gives, None for no or several series."""
        found = self.query(expression)
        return found[0].value if len(found) == 1 else None

    def wait(self, expression: str, *, series: int | None = None) -> Any:
        """Wait until an expression gives as many series, one at least without a number."""

        def probe() -> list[Sample] | None:
            found = self.query(expression)
            enough = bool(found) if series is None else len(found) == series
            return found if enough else None

        if series == 0:
            # a scrape that is too slow takes all series away for a moment
            gone = f"last_over_time(({expression})[3s:1s]) or {UNSEEN}"
            wait_until(
                lambda: not self.query(gone), why=lambda: f"no {expression}\n{self.query(gone)!s}"
            )
            return []
        return wait_until(
            probe,
            why=lambda: f"{series or 'some'} series of {expression}\n{self.query(expression)!s}",
        )

    def faults(self) -> list[str]:
        """Return what the rules could not be evaluated for."""
        groups = self._get("rules")["groups"]
        return [
            f"{rule['name']}: {rule['lastError']}"
            for group in groups
            for rule in group["rules"]
            if rule.get("lastError")
        ]

    def _get(self, what: str, **query: str) -> Any:
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as fault:
            raise LabError(f"{query}: {fault.read().decode()}") from fault
