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
from gpulock_exporter.metrics.devices import SEVERAL, SINGLE

from gpulock.node.devices import Device
from tests.gpu.check import compare_devices
from tests.gpu.compare import Card, Finding, Round, judge
from tests.gpu.record import About, masked
from tests.gpu.rules import ASKED, OURS_ALONE, RULES
from tests.nvml.double import Double, Process

ROOT = Path(__file__).resolve().parents[2]
LOAD = "sh -c 'echo running; exec sleep {seconds}'"  # the double is at work all the time
FAKE_CUDA = """
#include <unistd.h>
int cuInit(int f) { return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return n ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = c; return 0; }
int cuCtxSetCurrent(void *c) { return !c; }
int cuMemAlloc_v2(unsigned long long *m, unsigned long s) { *m = s; return s != 1 << 30; }
int cuMemsetD8_v2(unsigned long long m, unsigned char v, unsigned long s) { return m != s; }
int cuCtxSynchronize(void) { usleep(1000); return 0; }
"""


class Done(NamedTuple):
    """How a check ended."""

    code: int
    said: str
    page: str
    raw: Path


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
        page = next(self.out.glob("*.md"), None)
        text = page.read_text() if page else ""
        raw = page.with_suffix("") if page else self.out
        return Done(done.returncode, done.stdout + done.stderr, text, raw)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=2) as nvml:
        for gpu, percent in ((0, 60), (1, 0)):
            nvml.load(gpu, percent, percent / 2)
        nvml.update({"gpu0.memory.used": "9000M", "gpu1.ecc.volatile.corrected.dram": "3"})
        nvml.set("gpu0.process_utilization", f"{os.getpid()}:60:30:0:0")
        nvml.processes(0, [Process(os.getpid(), "8000M")])
        yield Machine(tmp_path, nvml)


def test_what_asks_the_same_driver_agrees_under_load_and_is_recorded(machine: Machine) -> None:
    """What each process did is in it; the UUIDs of the machine are not."""
    done = machine.check("--load", LOAD)
    assert done.code == 0, done.said
    assert done.page.startswith("# NVIDIA H200, driver ")
    assert "agrees with nvidia-smi" in done.page
    assert "`busy_seconds_total`" in done.page
    assert {path.name for path in done.raw.iterdir()} >= {"idle.xml", "half-load.metrics"}
    answers = json.loads((done.raw / "nvml.json").read_text())["cards"][0]["answers"]
    (one,) = answers["nvmlDeviceGetProcessUtilization(0)"]
    assert (one["pid"], one["smUtil"]) == (os.getpid(), 60)
    preset = machine.nvml.control.with_suffix(".preset").read_text()
    uuids = [x.partition("=")[2] for x in preset.splitlines() if x[4:].startswith(".uuid=")]
    assert len(uuids) == 2
    written = done.page + "".join(path.read_text() for path in done.raw.iterdir())
    assert not any(uuid in written for uuid in uuids)
    assert "<serial>0</serial>" in written


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


def test_each_difference_is_found_and_named_and_nothing_else_is(machine: Machine) -> None:
    done = machine.check("--no-load", FAKE_SMI_PLANT=",".join(PLANTED))
    assert done.code == 1, done.said
    lines = [line for line in done.said.splitlines() if line.startswith("DIFFERS  card")]
    metrics = {line.split("  ")[2].partition(":")[0] for line in lines}
    assert metrics - {"busy_seconds_total"} == set(PLANTED.values())


def test_a_counter_that_runs_too_slowly_is_found(machine: Machine) -> None:
    """nvidia-smi sees a card that is busier than ours ever counts."""
    done = machine.check("--no-load", "--seconds", "12", FAKE_SMI_PLANT="utilization.gpu=+30")
    assert done.code == 1, done.said
    assert "  busy_seconds_total: " in done.said


def test_a_field_that_this_nvidia_smi_lacks_is_not_asked_for(machine: Machine) -> None:
    """It would refuse the whole question; the older name is taken."""
    done = machine.check("--no-load", FAKE_SMI_LACKS="power.draw.instant,gpu_recovery_action")
    assert done.code == 2, done.said
    assert "rounds, power.draw |" in done.page
    assert "nvidia-smi has no gpu_recovery_action" in done.page


def test_without_a_load_the_check_is_not_whole_and_says_how_to_give_one(machine: Machine) -> None:
    done = machine.check("--load", "sh -c 'echo no CUDA driver here >&2; exit 2'")
    assert done.code == 2, done.said
    assert "idle only: no CUDA driver here" in done.said
    assert "--load" in done.said


def test_a_machine_without_a_gpu_is_not_checked(machine: Machine, tmp_path: Path) -> None:
    done = machine.check("--driver-root", str(tmp_path / "none"))
    assert (done.code, machine.out.exists()) == (2, False)
    assert "no NVIDIA GPU here" in done.said


@pytest.mark.parametrize(
    ("index", "said", "error"),
    [("0", "running\n", ""), ("5", "", "GPU 5: cuDeviceGet: error 101\n")],
)
def test_the_load_says_that_it_runs_or_which_call_was_refused(
    tmp_path: Path, index: str, said: str, error: str
) -> None:
    library = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(library, input=FAKE_CUDA, text=True, check=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/load.py"), index, "0.5", "0.3"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.stdout, done.stderr, done.returncode) == (said, error, int(bool(error)))


def test_a_device_that_nvml_knows_otherwise_is_named() -> None:
    """A minor that differs is a job on another's card."""
    ours = Device("0000:1b:00.0", 0)
    ours.minor, ours.uuid = 1, "GPU-1"
    theirs = {"bus_id": "00000000:1B:00.0", "minor": 1, "uuid": "GPU-1"}
    assert compare_devices([ours], [{"identity": theirs}]) == []
    other = {"identity": {**theirs, "minor": 2}}
    assert compare_devices([ours], [other]) == ["GPU 0: minor is 1 in /proc, 2 in NVML"]
    assert compare_devices([ours], []) == ["/proc has 1 GPUs, NVML 0"]


def test_every_family_of_a_card_is_compared_or_said_not_to_be() -> None:
    compared = {rule.metric.split()[0] for rule in RULES}
    assert compared | set(OURS_ALONE) == {"lock_info", *(row[0] for row in (*SINGLE, *SEVERAL))}
    assert not compared & set(OURS_ALONE)


def judged(metric: str, grown: float | None, said: str, phase: str = "idle") -> Finding:
    """Return what ten seconds come to in which a metric was `grown` and its field was `said`."""
    fields = next(rule for rule in RULES if rule.metric == metric).fields
    rows = {"GPU-1": dict.fromkeys(ASKED, "[N/A]") | {"processes": "0"}}
    rows["GPU-1"] |= {field: said for field in fields}
    rounds: list[Round] = []
    for second in (0.0, 10.0):
        counts = next(rule for rule in RULES if rule.metric == metric).grows
        value = 0.0 if counts and not second else grown
        cards = {"GPU-1": Card({}, {} if value is None else {metric: value})}
        rounds.append(Round(second, phase, True, cards, rows, cards))
    return next(line.finding for line in judge(rounds, ASKED) if line.metric == metric)


@pytest.mark.parametrize(
    ("metric", "ours", "said", "phase", "finding"),
    [
        ("temperature_celsius", 41, "43", "idle", Finding.AGREED),
        ("temperature_celsius", 41, "44", "idle", Finding.DIFFERED),
        ("power_watts", None, "77.1", "idle", Finding.DIFFERED),
        ("power_watts", 77.1, "[N/A]", "idle", Finding.DIFFERED),
        ("power_watts", None, "[N/A]", "idle", Finding.NEITHER),
        ("ecc_errors_total l1 corrected", None, "0", "idle", Finding.NEITHER),
        ("ecc_errors_total l1 corrected", None, "1", "idle", Finding.DIFFERED),
        ("foreign_processes", None, "1", "idle", Finding.NEITHER),
        ("clock_event_active sw_power_cap", 1, "0x4", "idle", Finding.AGREED),
        ("clock_event_active sw_power_cap", 1, "0x8", "idle", Finding.DIFFERED),
        ("energy_joules_total", 3000, "300.00", "idle", Finding.AGREED),
        ("energy_joules_total", 1350, "300.00", "idle", Finding.DIFFERED),
        ("observed_seconds_total", 2, "", "idle", Finding.UNASKED),  # it may write no samples
        ("observed_seconds_total", 20, "", "idle", Finding.DIFFERED),
        ("observed_seconds_total", 10, "", "full load", Finding.AGREED),
        ("observed_seconds_total", 2, "", "full load", Finding.DIFFERED),
    ],
)
def test_what_both_say_is_judged(
    metric: str, ours: float | None, said: str, phase: str, finding: Finding
) -> None:
    assert judged(metric, ours, said, phase) is finding


def test_a_record_names_neither_machine_nor_instance() -> None:
    mig = "MIG-11111111-2222-3333-4444-555555555555"
    about = About("2026-11-21", "NVIDIA H200", "580.1", "", ["GPU-a", "GPU-b"], "gpu07")
    text = masked(f"GPU-b and {mig} on gpu07, not on gpu077", about)
    assert text == (
        "GPU-00000000-0000-0000-0000-000000000001 and MIG-00000000-0000-0000-0000-000000000002 "
        "on node, not on gpu077"
    )
    assert about.stem == "2026-11-21-nvidia-h200-580.1"
