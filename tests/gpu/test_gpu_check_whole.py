# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` from end to end on the NVML double: the exporter beside a nvidia-smi of ours.

Both ask the same double, so that they agree; what is planted in the one must be found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.nvml.double import Double, Process

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tests/gpu/check.py"
SMI = ROOT / "tests/gpu/fake_smi.py"
LOAD = "sh -c 'echo running; exec sleep {seconds}'"  # the double is at work all the time
SHORT = "5"  # seconds of a phase


class Done(NamedTuple):
    """How a check ended."""

    code: int
    said: str
    out: Path


class Bench:
    """A machine of two H200 that are at work, with a nvidia-smi."""

    def __init__(self, folder: Path, nvml: Double) -> None:
        self._folder = folder
        self.nvml = nvml
        self.smi = folder / "nvidia-smi"
        self.smi.write_text(f'#!/bin/sh\nexec {sys.executable} {SMI} "$@"\n')
        self.smi.chmod(0o755)

    def check(self, *words: str, **env: str) -> Done:
        """Run the check."""
        out = self._folder / "hardware"
        given = {
            "--config": self.nvml.node / "gpulock.conf",
            "--driver-root": self.nvml.node / "proc/driver/nvidia",
            "--nvidia-smi": self.smi,
            "--out": out,
            "--seconds": SHORT,
        }
        done = subprocess.run(
            [sys.executable, str(CHECK), *(str(x) for pair in given.items() for x in pair), *words],
            env={**os.environ, **self.nvml.env, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout + done.stderr, out)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Give such a machine."""
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=2) as nvml:
        for gpu, percent in ((0, 60), (1, 0)):
            nvml.load(gpu, percent, percent / 2)
        nvml.update({"gpu0.memory.used": "9000M", "gpu1.ecc.volatile.corrected.dram": "3"})
        nvml.processes(0, [Process(os.getpid(), "8000M")])
        yield Bench(tmp_path, nvml)


def test_what_asks_the_same_driver_agrees_under_load_and_is_recorded(bench: Bench) -> None:
    """Exit code 0, and a page with the raw answers beside it."""
    done = bench.check("--load", LOAD)
    assert done.code == 0, done.said
    page = next(done.out.glob("*-nvidia-h200-*.md"))
    text = page.read_text()
    assert "agrees with nvidia-smi" in text
    assert "`busy_seconds_total`" in text
    raw = {path.name for path in done.out.glob("*/*")}
    assert {"idle.xml", "full-load.csv", "half-load.metrics", "nvml.json"} <= raw


def test_what_each_process_did_is_recorded(bench: Bench) -> None:
    bench.nvml.set("gpu0.process_utilization", f"{os.getpid()}:60:30:0:0")
    done = bench.check("--no-load")
    told = json.loads(next(done.out.glob("*/nvml.json")).read_text())["cards"][0]["answers"]
    (one,) = told["nvmlDeviceGetProcessUtilization(0)"]
    assert (one["pid"], one["smUtil"]) == (os.getpid(), 60)


def test_no_uuid_of_the_machine_is_in_its_record(bench: Bench) -> None:
    """The record is for everybody."""
    done = bench.check("--no-load")
    uuids = [
        line.partition("=")[2]
        for line in (bench.nvml.control.with_suffix(".preset")).read_text().splitlines()
        if line.startswith(("gpu0.uuid=", "gpu1.uuid="))
    ]
    assert len(uuids) == 2
    written = [path for path in done.out.rglob("*") if path.is_file()]
    assert len(written) >= 5
    for path in written:
        assert not any(uuid in path.read_text() for uuid in uuids), path


PLANTED = {
    "temperature.gpu=+9": "temperature_celsius",
    "memory.used=+64": "memory_used_bytes",
    "utilization.gpu=+25": "utilization_ratio",
    "ecc.errors.corrected.volatile.dram=+1": "ecc_errors_total dram corrected",
    "name=NVIDIA H100": "info name",
    "gpu_recovery_action=Reset": "recovery_action",
    "clocks.sm=[N/A]": "sm_clock_hertz",
    "clocks.mem=soon": "memory_clock_hertz",
}


def test_each_difference_is_found_and_named_and_nothing_else_is(bench: Bench) -> None:
    """Exit code 1; what was left alone agrees."""
    done = bench.check("--no-load", FAKE_SMI_PLANT=",".join(PLANTED))
    assert done.code == 1, done.said
    found = {
        line.split("  ")[2].partition(":")[0]
        for line in done.said.splitlines()
        if line.startswith("DIFFERS  card")
    }
    assert found - {"busy_seconds_total"} == set(PLANTED.values())


def test_a_counter_that_runs_too_slowly_is_found(bench: Bench) -> None:
    """nvidia-smi sees a card that is busier than ours ever counts."""
    planted = {"FAKE_SMI_PLANT": "utilization.gpu=+30"}
    done = bench.check("--no-load", "--seconds", "12", **planted)
    assert done.code == 1, done.said
    assert "  busy_seconds_total: " in done.said


def test_the_instances_of_a_split_card_are_compared_too(bench: Bench) -> None:
    """By their places and their memory; nobody can tell how busy the card itself is."""
    bench.nvml.split(1, ["3g.71gb", "1g.18gb"])
    bench.nvml.set("gpu1.mig0.memory.used", "500M")
    done = bench.check("--no-load")
    assert done.code == 2, done.said
    text = next(done.out.glob("*.md")).read_text()
    assert "`mig gi1 ci0 memory_used_bytes` | 524288000, nvidia-smi 524288000" in text
    assert "`mig gi2 ci0 memory_total_bytes`" in text
    done = bench.check("--no-load", FAKE_SMI_MIG_MIB="64")
    assert done.code == 1, done.said
    assert "  mig gi1 ci0 memory_used_bytes: " in done.said


def test_a_field_that_this_nvidia_smi_lacks_is_not_asked_for(bench: Bench) -> None:
    """It would refuse the whole question; the older name is taken."""
    done = bench.check("--no-load", FAKE_SMI_LACKS="power.draw.instant,gpu_recovery_action")
    assert done.code == 2, done.said
    text = next(done.out.glob("*.md")).read_text()
    assert "rounds, power.draw |" in text
    assert "nvidia-smi has no gpu_recovery_action" in text


def test_without_a_load_the_check_is_not_whole_and_says_how_to_give_one(bench: Bench) -> None:
    """Idle is compared all the same."""
    done = bench.check("--load", "sh -c 'echo no CUDA driver here >&2; exit 2'")
    assert done.code == 2, done.said
    assert "idle only: no CUDA driver here" in done.said
    assert "--load" in done.said


def test_a_machine_without_a_gpu_is_not_checked(bench: Bench, tmp_path: Path) -> None:
    """Exit code 2, and nothing is written."""
    done = bench.check("--driver-root", str(tmp_path / "none"))
    assert done.code == 2
    assert "no NVIDIA GPU here" in done.said
    assert not done.out.exists()
