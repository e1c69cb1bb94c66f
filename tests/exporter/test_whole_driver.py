# SPDX-License-Identifier: Apache-2.0
"""The whole exporter beside a driver that hangs, comes late or is loaded anew, and cards that go.

Each scrape is answered in time all along (`Whole.scrape` sees to that), old values are dropped,
locks are told, and it recovers by itself.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.exporter.whole import UTILISATION, Scrape, Whole, on_double
from tests.nvml.double import Double, Hang
from tests.support.wait import let_work, wait_until


def test_a_driver_that_is_installed_later_is_found(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml:
        later = tmp_path / "lib"
        env = {"LD_LIBRARY_PATH": str(later), "NVML_DOUBLE": str(nvml.control)}
        cards = nvml.node / "proc/driver/nvidia/gpus"
        cards.rename(cards.with_name("away"))
        with Whole(tmp_path, nvml, env=env) as exporter:
            found = exporter.wait_until(lambda s: s.all("gpulock_gpus", state="missing") == [2])
            assert found.one("gpulock_nvml_up") == 0
            assert sum(found.all("gpulock_gpus")) == 2
            said = exporter.page_says("role=alert")
            assert "No samples" in said
            exporter.page_says("install the driver&#x27;s libnvidia-ml.so.1")
            cards.with_name("away").rename(cards)
            later.symlink_to(nvml.library.parent)
            exporter.up(2)
            exporter.wait_until(lambda s: s.all("gpulock_gpus", state="free") == [2])


@pytest.mark.parametrize("hangs", [False, True])
def test_the_worker_ends_with_the_exporter(tmp_path: Path, hangs: bool) -> None:
    with on_double(tmp_path, "dgx1", 1, {"SAMPLE_PERIOD": "5"}) as (nvml, exporter):
        exporter.up()
        (worker,) = exporter.workers()
        if hangs:
            nvml.hang(call := "nvmlDeviceGetUtilizationRates", "deaf")
            before = nvml.calls()[call]
            wait_until(lambda: nvml.calls()[call] > before, why="the worker to hang")
        exporter.process.kill()
        exporter.process.wait()
        psutil.wait_procs([worker], 60)
        assert not worker.is_running()
        wait_until(lambda: not nvml.held(), why="the driver to be free")


TEMPERATURE, RESPONDING = "gpulock_gpu_temperature_celsius", "gpulock_gpu_responding"
OBSERVED = "gpulock_gpu_observed_seconds_total"
AGE = {"SAMPLE_PERIOD": "0.4"}  # a sample is old after 4 s


def is_dark(found: Scrape) -> bool:
    """Tell whether no value of the driver is told any more, and the locks still are."""
    board = [name for name in found.names() if name.startswith("gpulock_gpu_") and "_busy" in name]
    return (
        found.all("gpulock_nvml_up") == [0]
        and UTILISATION not in found.names()
        and "gpulock_gpu_observed_seconds_total" not in found.names()
        and set(board) <= {"gpulock_gpu_last_busy_timestamp_seconds"}
        and found.states().count("held") == 1
    )


def test_a_call_that_hangs_for_ever_costs_its_values_and_nothing_else(tmp_path: Path) -> None:
    with on_double(tmp_path, "dgx-h200", 2, AGE) as (nvml, exporter):
        before = exporter.up(2)
        exporter.claim(0)
        nvml.load(0, 100)
        nvml.hang("nvmlDeviceGetCount*", "deaf")
        exporter.wait_until(is_dark)
        assert "the driver has not answered for" in exporter.page_says("role=alert")
        assert exporter.get("/-/healthy").status == 200
        nvml.reset()
        counted = before.totals()
        after = exporter.wait_until(lambda found: found.totals().keys() >= counted.keys())
        for key, value in counted.items():
            assert after.values[key] >= value, key


def answers_for(found: Scrape, *gpus: int) -> bool:
    """Tell whether these of the cards, and no others, are told of now."""
    told = [int(found.all(TEMPERATURE, gpu=str(gpu)) != []) for gpu in range(3)]
    wanted = [int(gpu in gpus) for gpu in range(3)]
    return told == wanted == [sum(found.all(RESPONDING, gpu=str(gpu))) for gpu in range(3)]


@pytest.mark.parametrize("manner", ["deaf", "undead", signal.SIGSEGV, signal.SIGABRT])
def test_a_card_that_hangs_or_crashes_the_library_costs_its_own_values_alone_and_is_named(
    tmp_path: Path, manner: Hang | signal.Signals
) -> None:
    with on_double(tmp_path, "dgx1", 3, AGE) as (nvml, exporter):
        before = exporter.up(3).one(OBSERVED, gpu="2")
        assert answers_for(exporter.scrape(), 0, 1, 2)
        if isinstance(manner, signal.Signals):
            nvml.crash(call := "nvmlDeviceGetTemperature", manner, gpu=1)
            words, seconds = f"{call} ends its process by {manner.name}", 8
        else:
            nvml.hang(call := "nvmlDeviceGetTemperature", manner, gpu=1)
            words, seconds = f"{call} hangs in the driver", 2
        found = exporter.wait_until(lambda s: answers_for(s, 0, 2))
        assert found.states(gpu="1") == ["missing"]
        assert exporter.page_says(words)
        bus = sorted(os.listdir(nvml.node / "proc/driver/nvidia/gpus"))[1]
        assert f"lost {bus} " in (exporter.folder / "sample").read_text()
        exporter.wait_until(lambda s: sum(s.all(OBSERVED, gpu="2")) > before + seconds)
        found = exporter.scrape()
        assert answers_for(found, 0, 2), "a trial has crashed meanwhile"
        assert found.one("gpulock_nvml_workers_abandoned") == (manner == "undead")
        nvml.reset()
        exporter.wait_until(lambda s: answers_for(s, 0, 1, 2))
        assert f"GPU at {bus}: {words}" in exporter.errors.read_text()


@pytest.mark.parametrize("state", ["R", "D"])
def test_a_frame_more_than_late_does_not_stop_the_end(tmp_path: Path, state: str) -> None:
    """systemd waits for the exporter: neither a driver that hangs nor one that works delays it."""
    with on_double(tmp_path, "dgx1", 1) as (nvml, exporter):
        exporter.up()
        if state == "D":
            nvml.hang("*", "undead")
            let_work(1.2)
        os.kill(exporter.process.pid, signal.SIGTERM)
        assert exporter.process.wait(60) == 0
