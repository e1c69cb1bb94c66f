# SPDX-License-Identifier: Apache-2.0
"""gpulock-exporter as a whole, as a process, on a simulated node."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.simulate.node import write_node

ROOT = Path(__file__).resolve().parents[2]
CLIENT = "from gpulock_exporter.app import main; import sys; sys.exit(main())"


class Running:
    """An exporter on a simulated DGX-1."""

    def __init__(self, root: Path) -> None:
        self.node = write_node(root / "node", "dgx1")
        self.folder = root / "exporter"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.process = self.start("--listen", f"127.0.0.1:{self.port}")

    def start(self, *words: str) -> subprocess.Popen[str]:
        own = ["--config", str(self.node.config), "--folder", str(self.folder)]
        path = f"{ROOT}:{ROOT / 'exporter'}"
        return subprocess.Popen(
            [sys.executable, "-c", CLIENT, *own, *words],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )

    def get(self, path: str) -> str:
        """Return what is answered, empty as long as nothing serves."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except (urllib.error.URLError, ConnectionError):
            return ""

    def wait(self, path: str, holds: Callable[[str], bool]) -> str:
        """Return the answer once it is as wanted."""
        end, text = time.monotonic() + 20, ""
        while time.monotonic() < end:
            text = self.get(path)
            if holds(text):
                return text
            time.sleep(0.05)
        raise AssertionError(f"{path}: {text[-400:]!r}")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    found = Running(tmp_path)
    yield found
    found.process.terminate()
    found.process.communicate(timeout=10)


def test_a_node_is_told_to_prometheus_to_people_and_to_gpulock(running: Running) -> None:
    text = running.wait("/metrics", lambda t: "gpulock_gpu_utilization_ratio{" in t)
    assert text.count("\ngpulock_gpu_info{") == 8
    assert 'gpulock_gpus{state="free"} 8' in text
    assert "gpulock_nvml_up 1" in text
    page = running.get("/")
    assert page.count("<article") == 8 and "V100" in page and "http:" not in page
    assert running.get("/-/healthy") == "gpulock-exporter is healthy\n"
    assert (running.folder / "sample").read_text().startswith("gpulock-sample 1\n")


def test_a_pause_lets_go_of_the_driver_and_values_grow_old(running: Running) -> None:
    running.wait("/metrics", lambda t: "gpulock_nvml_up 1" in t)
    client = running.start("pause")
    assert client.wait(10) == 0
    client.communicate()
    page = running.wait("/", lambda t: "role=alert" in t)
    assert "paused" in page
    gone = running.wait("/metrics", lambda t: "gpulock_nvml_up 0" in t)
    assert "gpulock_gpu_utilization_ratio" not in gone and "gpulock_gpu_locked" in gone
    running.process.send_signal(signal.SIGUSR2)
    running.wait("/metrics", lambda t: "gpulock_nvml_up 1" in t)


def test_nobody_to_tell_is_said(tmp_path: Path) -> None:
    node = write_node(tmp_path / "node", "dgx1")
    words = ["--config", str(node.config), "--folder", str(tmp_path / "none"), "resume"]
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *words],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, "none runs" in done.stderr) == (1, True)
