# SPDX-License-Identifier: Apache-2.0
"""What a real Prometheus says of the exporter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.simulate.node import write_node

pytestmark = pytest.mark.lab
ROOT = Path(__file__).resolve().parents[2]
CLIENT = "from gpulock_exporter.app import main; import sys; sys.exit(main())"
ADDRESS = "127.0.0.1:19465"


@pytest.fixture(scope="module")
def promtool() -> str:
    """Have promtool: Debian's package prometheus, which starts no server of its own here."""
    if shutil.which("promtool") is None and os.geteuid() == 0:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "install", "-y"]
        subprocess.run([*apt, "--no-install-recommends", "prometheus"], env=quiet, check=False)
    found = shutil.which("promtool")
    assert found, "this needs promtool: apt-get install prometheus"
    return found


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[str]:
    """Give what the exporter says of a simulated node on which a job runs."""
    node = write_node(tmp_path / "node", "dgx-h200")
    own = ["--config", str(node.config), "--folder", str(tmp_path / "exporter")]
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *own, "--listen", ADDRESS],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"},
    ) as process:
        try:
            yield scraped()
        finally:
            process.terminate()


def scraped() -> str:
    """Return the first scrape that has values of the driver."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://{ADDRESS}/metrics", timeout=5) as answer:
                text: str = answer.read().decode()
            if "gpulock_gpu_busy_seconds_total{" in text:
                return text
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.1)
    raise AssertionError("the exporter has no values")


def test_promtool_has_no_complaint(promtool: str, metrics: str) -> None:
    done = subprocess.run(
        [promtool, "check", "metrics"], input=metrics, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
