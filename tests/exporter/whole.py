# SPDX-License-Identifier: Apache-2.0
"""gpulock-exporter as an administrator starts it, with the real pynvml on the NVML double."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.exporter.servers import Answer, fetch
from tests.nvml.double import Double
from tests.support.ports import ReservedPort
from tests.support.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from gpulock_exporter.app.program import main; raise SystemExit(main())"
GPULOCK = [sys.executable, "-c", "from gpulock.cli import main; raise SystemExit(main())"]
UTILISATION = "gpulock_gpu_utilization_ratio"

Labels = frozenset[tuple[str, str]]


class Scrape:
    """The values of one scrape, as Prometheus's own parser reads them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.values: dict[tuple[str, Labels], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.values, f"{key} twice"
                self.values[key] = sample.value

    def all(self, name: str, /, **labels: str) -> list[float]:
        """Return the values of a metric whose labels have these among them."""
        wanted = labels.items()
        return [v for (n, own), v in self.values.items() if n == name and wanted <= own]

    def one(self, name: str, /, **labels: str) -> float:
        """Return the only one of them."""
        found = self.all(name, **labels)
        assert len(found) == 1, f"{name}{labels}: {found}"
        return found[0]

    def states(self, **labels: str) -> list[str]:
        """Return the states of the devices whose labels have these among them."""
        wanted = labels.items()
        return [
            dict(own)["state"]
            for (name, own), value in self.values.items()
            if name == "gpulock_gpu_state" and value == 1 and wanted <= own
        ]

    def names(self) -> set[str]:
        """Return the names of all metrics that have a value."""
        return {name for name, _ in self.values}

    def totals(self) -> dict[tuple[str, Labels], float]:
        """Return all counters of GPUs and claims; a process' own begin anew with it."""
        return {
            (name, labels): value
            for (name, labels), value in self.values.items()
            if name.startswith("gpulock_") and name.endswith("_total")
        }


class Whole:
    """An exporter on a double; `settings` are lines of gpulock.conf, `words` its options."""

    def __init__(
        self,
        root: Path,
        nvml: Double,
        *words: str,
        settings: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        client: ssl.SSLContext | None = None,
        before: str = "",
    ) -> None:
        self._before = before  # what its program runs first
        self.root, self.nvml, self.client = root, nvml, client
        self.ends: tuple[int, ...] = ()  # exit codes that a test expects beside 0
        self.folder = nvml.node / "run/gpulock-exporter"
        self.config = root / "gpulock.conf"
        self.errors = root / "stderr"
        self._words = words
        self._env = dict(env) if env is not None else nvml.env
        lines = (nvml.node / "gpulock.conf").read_text().splitlines()
        own = settings or {}
        kept = [one for one in lines if one.partition("=")[0] not in {"SIMULATION", *own}]
        self.config.write_text("\n".join([*kept, *(f"{k}={v}" for k, v in own.items())]) + "\n")
        self.reserved = ReservedPort()
        self.port = self.reserved.number
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the exporter, as a rule once."""
        program = [sys.executable, "-c", self._before + PROGRAM, "--config", str(self.config)]
        words = ("--listen", f"127.0.0.1:{self.port}", *self._words)
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [*program, *words], env=self.environment(), stderr=errors
            )
        return self.process

    def environment(self) -> dict[str, str]:
        """Return what the program finds: the double, and no home of anybody."""
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}",
            **self._env,
        }

    def __enter__(self) -> Whole:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.nvml.reset()
        self.reserved.release()
        code = self.process.poll()
        if code is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                code = self.process.wait(60)
            finally:
                self.process.kill()
                self.process.wait()
        said = self.errors.read_text()
        if kind is None:
            assert code in (0, -signal.SIGKILL, *self.ends), said
            assert "Traceback" not in said, said

    def get(self, path: str = "/metrics", headers: Mapping[str, str] | None = None) -> Answer:
        """Ask on a connection of its own; raise OSError where nothing listens."""
        return fetch(self.port, path, headers, context=self.client, seconds=20)

    def scrape(self) -> Scrape:
        """Return what a scrape says."""
        answer = self.get()
        return Scrape(answer.text if answer.status == 200 else "")

    def wait_until(self, holds: Callable[[Scrape], object]) -> Scrape:
        """Scrape until something is so."""
        found = Scrape("")

        def so() -> Scrape | None:
            nonlocal found
            assert self.process.poll() is None, self.errors.read_text()
            try:
                found = self.scrape()
            except OSError:
                found = Scrape("")  # it has only begun
            return found if holds(found) else None

        def why() -> str:
            return f"another scrape\n{self.errors.read_text()}\n{found.text[-3000:]}"

        return wait_until(so, why=why)

    def up(self, devices: int = 1) -> Scrape:
        """Scrape until the driver is heard, of so many devices at least."""
        return self.wait_until(
            lambda s: (
                s.all("gpulock_nvml_up") == [1]
                and len(s.all("gpulock_gpu_observed_seconds_total")) >= devices
                and min(s.all("gpulock_gpu_observed_seconds_total")) > 0
            )
        )

    def page_says(self, words: str) -> str:
        """Return the page once it says so."""
        return wait_until(
            lambda: text if words in (text := self.get("/").text) else None,
            why=lambda: f"{words!r} on the page\n{self.get('/').text[-2000:]}",
        )

    def workers(self) -> list[psutil.Process]:
        """Return its workers, those that nobody can reap included."""
        return psutil.Process(self.process.pid).children()

    def gpulock(self, *words: str) -> str:
        """Run gpulock on this node; return what it printed."""
        done = subprocess.run(
            [*GPULOCK, "--config", str(self.config), *words],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def claim(self, device: int) -> str:
        """Let this test hold a device; return the token of its claim."""
        self.gpulock("claim", "--devices", str(device), "--pid", str(os.getpid()))
        bus = sorted(os.listdir(self.nvml.node / "proc/driver/nvidia/gpus"))[device]
        owner = (self.nvml.node / "run/gpulock/locks" / bus / "owner").read_text()
        return dict(line.split("=", 1) for line in owner.splitlines()[1:])["token"]

    def release(self) -> None:
        """Give back what this test holds."""
        self.gpulock("release", "--pid", str(os.getpid()))


@contextmanager
def on_double(
    root: Path, preset: str, gpus: int, settings: Mapping[str, str] | None = None
) -> Generator[tuple[Double, Whole]]:
    """Give a double of so many cards, and an exporter on it."""
    with (
        Double(root / "nvml", preset=preset, gpus=gpus) as nvml,
        Whole(root, nvml, settings=settings) as exporter,
    ):
        yield nvml, exporter


def pss_mib(pid: int) -> float:
    """Return the proportional set size of a process: what it costs the node."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(x for x in rollup.splitlines() if x.startswith("Pss:")).split()[1]) / 1024
