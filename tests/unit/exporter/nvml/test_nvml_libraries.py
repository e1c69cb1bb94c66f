# SPDX-License-Identifier: Apache-2.0
"""What a look tells on the libraries of drivers that differ, with each binding that is allowed.

Version 3 of the process lists has entries of 32 bytes with 535.54, and of 24 with the others; 390
has the first version alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.nvml.double import Double, Process
from tests.support.exporter_nvml import Eye, device

DRIVERS = ("390.157", "470.57.02", "535.54.03", "535.129.03", "580.65.06")
APART = 510  # drivers that tell apart what they reserve
NEWER = 470  # drivers that tell who is behind MPS: older ones have no such list
BINDINGS = ("12.535.77", "12.535.108", "13.580.82")  # the first is not allowed, and does no harm
RUNNING = [Process(4001, "1M"), Process(4002, "3M"), Process(4003, "-", "G")]
TOLD = {4001: 1 << 20, 4002: 3 << 20, 4003: None}


def look_tells_all(folder: Path, driver: str, binding: Path | None = None) -> None:
    """Hold what a look says of two busy cards to what the library was told."""
    with Double(folder / driver, preset="dgx1", gpus=2, driver=driver) as nvml:
        behind_mps = int(driver.partition(".")[0]) >= NEWER
        told = {**TOLD, 4004: 5 << 20} if behind_mps else TOLD
        nvml.processes(0, [*RUNNING, Process(4004, "5M", "M")])
        nvml.load(0, 87)
        nvml.update({"gpu0.temperature": 71, "gpu0.memory.used": "8G", "gpu0.energy": 7_500})
        with Eye(nvml, binding) as eye:
            eye.look()
            frame = eye.look(processes=True)
    assert frame.failures == {}
    assert frame.driver == driver
    card, other = device(frame, 0), device(frame, 1)
    assert (card.processes, other.processes) == (told, {})
    assert (card.utilization, card.temperature, card.energy) == (0.87, 71.0, 7.5)
    reserved = 0 if int(driver.partition(".")[0]) >= APART else 270 << 20
    assert card.memory_used == (8 << 30) + reserved


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_look_tells_all_on_the_library_of(driver: str, tmp_path: Path) -> None:
    look_tells_all(tmp_path, driver)


@pytest.mark.install
@pytest.mark.timeout(600)
@pytest.mark.parametrize("binding", BINDINGS)
def test_a_look_tells_all_with_nvidia_ml_py(binding: str, tmp_path: Path) -> None:
    place, wanted = tmp_path / "binding", f"nvidia-ml-py=={binding}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", place, wanted]
    subprocess.run([str(word) for word in command], check=True)
    for driver in DRIVERS:
        look_tells_all(tmp_path, driver, place)


def test_a_library_with_mig_but_an_old_list_tells_no_processes(tmp_path: Path) -> None:
    hidden = [
        f"nvmlDeviceGet{kind}RunningProcesses_{version}"
        for kind in ("Compute", "Graphics", "MPSCompute")
        for version in ("v2", "v3")
    ]
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1, hidden=hidden) as nvml:
        nvml.processes(0, RUNNING)
        with Eye(nvml) as eye:
            assert device(eye.look(processes=True)).processes is None
