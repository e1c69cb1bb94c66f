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
from typing import Any, NamedTuple

import pytest

from gpulock.node.devices import Device
from tests.gpu.check import compare_devices, masked
from tests.gpu.compare import ASKED, RULES, Finding, Round, compare_values
from tests.nvml.double import Double, Process

ROOT = Path(__file__).resolve().parents[2]


class Done(NamedTuple):
    """How a check ended."""

    code: int
    said: str
    record: str

    @property
    def differing(self) -> set[str]:
        """Return the metrics that differ."""
        lines = [line for line in self.said.splitlines() if line.startswith("DIFFERS")]
        return {line.split("  ")[2].partition(":")[0] for line in lines}


class Machine:
    """Two H200 that are at work, with a nvidia-smi."""

    def __init__(self, folder: Path, nvml: Double) -> None:
        self.nvml, self.out = nvml, folder / "hardware"
        self._smi = folder / "nvidia-smi"
        self._smi.write_text(
            f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/gpu/fake_smi.py "$@"\n'
        )
        self._smi.chmod(0o755)

    def check(self, *words: str, **env: str) -> Done:
        """Run the check."""
        given = {
            "--config": self.nvml.node / "gpulock.conf",
            "--driver-root": self.nvml.node / "proc/driver/nvidia",
            "--nvidia-smi": self._smi,
            "--out": self.out,
            "--seconds": 5,
        }
        options = [str(word) for pair in given.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.check", *options, *words],
            env={**os.environ, **self.nvml.env, **env},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert "Traceback" not in done.stderr, done.stderr
        record = next(self.out.glob("*.json"), None)
        return Done(
            done.returncode, done.stdout + done.stderr, record.read_text() if record else ""
        )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=2) as nvml:
        for gpu, percent in ((0, 60), (1, 0)):
            nvml.load(gpu, percent, percent / 2)
        nvml.update({"gpu0.memory.used": "9000M", "gpu1.ecc.volatile.corrected.dram": "3"})
        nvml.set("gpu0.process_utilization", f"{os.getpid()}:60:30:0:0")
        nvml.processes(0, [Process(os.getpid(), "8000M")])
        yield Machine(tmp_path, nvml)


def test_what_asks_the_same_driver_agrees_and_is_recorded_without_its_names(
    machine: Machine,
) -> None:
    done = machine.check("--load", "exec sleep 600")
    assert done.code == 0, done.said
    record: dict[str, Any] = json.loads(done.record)
    assert any("busy_seconds_total" in line for line in record["compared"]["agreed"])
    (one,) = record["nvml"]["cards"][0]["answers"]["nvmlDeviceGetProcessUtilization(0)"]
    assert (one["pid"], one["smUtil"]) == (os.getpid(), 60)
    preset = machine.nvml.control.with_suffix(".preset").read_text()
    uuids = [x.partition("=")[2] for x in preset.splitlines() if x[4:].startswith(".uuid=")]
    assert len(uuids) == 2
    assert not any(uuid in done.record for uuid in uuids)
    assert "<serial>0</serial>" in done.record


PLANTED = {
    "temperature.gpu=+9": "temperature_celsius",
    "memory.used=+64": "memory_used_bytes",
    "utilization.gpu=+30": "utilization_ratio",
    "ecc.errors.corrected.volatile.dram=+1": "ecc_errors_total dram corrected",
    "name=NVIDIA H100": "info name",
    "gpu_recovery_action=Reset": "recovery_action",
    "clocks.sm=[N/A]": "sm_clock_hertz",
    "clocks.mem=soon": "memory_clock_hertz",
}


def test_each_difference_is_found_and_named_and_nothing_else_is(machine: Machine) -> None:
    done = machine.check("--seconds", "12", FAKE_SMI_PLANT=",".join(PLANTED))
    assert done.code == 1, done.said
    assert done.differing == {*PLANTED.values(), "busy_seconds_total"}


def test_a_device_that_nvml_knows_otherwise_is_named() -> None:
    """A minor that differs is a job on another's card."""
    ours = Device("0000:1b:00.0", 0)
    ours.minor, ours.uuid = 1, "GPU-1"
    theirs = {"bus_id": "00000000:1B:00.0", "minor": 1, "uuid": "GPU-1"}
    assert compare_devices([ours], [{"identity": theirs}]) == []
    other = {"identity": {**theirs, "minor": 2}}
    assert compare_devices([ours], [other]) == ["GPU 0: minor is 1 in /proc, 2 in NVML"]
    assert compare_devices([ours], []) == ["/proc has 1 GPUs, NVML 0"]


@pytest.mark.parametrize(
    ("metric", "ours", "said", "finding"),
    [
        ("temperature_celsius", 41, "43", Finding.AGREED),
        ("temperature_celsius", 41, "44", Finding.DIFFERED),
        ("power_watts", None, "77.1", Finding.DIFFERED),
        ("power_watts", 77.1, "[N/A]", Finding.DIFFERED),
        ("power_watts", None, "[N/A]", Finding.ABSENT),
        ("ecc_errors_total l1 corrected", None, "0", Finding.ABSENT),
        ("ecc_errors_total l1 corrected", None, "1", Finding.DIFFERED),
        ("clock_event_active sw_power_cap", 1, "0x4", Finding.AGREED),
        ("clock_event_active sw_power_cap", 1, "0x8", Finding.DIFFERED),
        ("energy_joules_total", 3000, "300.00", Finding.AGREED),
        ("energy_joules_total", 1350, "300.00", Finding.DIFFERED),
        ("energy_joules_total", None, "[N/A]", Finding.ABSENT),
    ],
)
def test_what_both_say_in_ten_seconds_is_judged(
    metric: str, ours: float | None, said: str, finding: Finding
) -> None:
    rule = next(rule for rule in RULES if rule.metric == metric)
    rows = {"GPU-1": dict.fromkeys(ASKED, "[N/A]") | dict.fromkeys(rule.fields, said)}
    rounds: list[Round] = []
    for second in (0.0, 10.0):
        value = 0.0 if rule.grows and not second and ours is not None else ours
        cards = {"GPU-1": {} if value is None else {metric: value}}
        rounds.append(Round(second, cards, rows, cards))
    found = compare_values(rounds, ASKED)
    assert [line.finding for line in found if line.metric == metric] == [finding]


def test_a_record_names_neither_machine_nor_instance() -> None:
    mig = "MIG-11111111-2222-3333-4444-555555555555"
    text = masked(f"GPU-b and {mig} on gpu07, not on gpu077", ["GPU-a", "GPU-b"], "gpu07")
    assert text == (
        "GPU-00000000-0000-0000-0000-000000000001 and MIG-00000000-0000-0000-0000-000000000002 "
        "on node, not on gpu077"
    )
