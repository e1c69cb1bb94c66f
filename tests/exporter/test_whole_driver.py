# SPDX-License-Identifier: Apache-2.0
"""The whole exporter beside a driver that dies, comes late, is loaded anew, and cards that go.

Each scrape is answered in time all along (`Whole.scrape` sees to that), old values are dropped,
locks are told, and it recovers by itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from gpulock.daemon.health.policy import HealthPolicy
from gpulock.daemon.reconcile.reconcile import DaemonNode
from gpulock.daemon.rounds import Rounds
from gpulock.deadline import clock_boottime
from gpulock.node.settings_file import read_settings
from tests.exporter.whole import UTILISATION, Whole
from tests.nvml.double import Double
from tests.support.journal import HeardJournal
from tests.support.wait import wait_until

LOOKED = "gpulock_sample_timestamp_seconds"


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


@pytest.mark.parametrize("counted", [True, False])
def test_the_next_claim_gets_another_card_than_the_lost_one(tmp_path: Path, counted: bool) -> None:
    """A worker that starts after the loss gets no handle of the card, or does not count it."""
    with (
        Double(tmp_path / "nvml", preset="dgx1", gpus=3) as nvml,
        Whole(tmp_path, nvml) as exporter,
    ):
        exporter.up(3)
        if counted:
            nvml.lose(0)
        else:
            nvml.set("gpu0.gone", 1)
        for worker in exporter.workers():
            worker.kill()
        exporter.wait_until(
            lambda s: s.all("gpulock_nvml_up") == [1] and len(s.all(UTILISATION)) == 2
        )
        settings = read_settings(str(exporter.config))
        journal = HeardJournal()
        rounds = Rounds(DaemonNode(settings), journal, [HealthPolicy(journal)])
        assert rounds.run_round(clock_boottime()) is not None
        first, second, _ = sorted(os.listdir(nvml.node / "proc/driver/nvidia/gpus"))
        assert [line for line in journal.said() if f"{first} does not answer" in line]
        exporter.gpulock("claim", "-n", "1", "--pid", str(os.getpid()))
        assert os.listdir(f"{settings.lock_dir}/locks") == [second]
        rounds.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_the_worker_ends_with_the_exporter(tmp_path: Path, hangs: bool) -> None:
    with (
        Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml,
        Whole(tmp_path, nvml, settings={"SAMPLE_PERIOD": "5"}) as exporter,
    ):
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
