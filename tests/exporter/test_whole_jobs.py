# SPDX-License-Identifier: Apache-2.0
"""The whole exporter on the double: what it tells of jobs and cards, and what it never tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpulock.node import sample
from gpulock.store import owner
from gpulock.store.locks import LockStore
from tests.exporter.whole import Scrape, Whole
from tests.nvml.double import Double, Process
from tests.support.clock import boot_time
from tests.support.locks import place_lock
from tests.support.trees import record

SECRET = "hunter2-correct-horse"
LOOKED = "gpulock_sample_timestamp_seconds"
USER = 'o"h\\ {}=,#€\u2028'


def test_the_last_second_of_a_claim_that_goes_is_in_its_file(tmp_path: Path) -> None:
    with (
        Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml,
        Whole(tmp_path, nvml, settings={"SAMPLE_PERIOD": "2"}) as exporter,
    ):
        nvml.load(0, 100)
        exporter.up(2)
        claimed = boot_time()
        token = exporter.claim(0)
        looked = exporter.wait_until(lambda s: s.all("gpulock_gpu_lock_info", gpu="0") == [1])
        last = looked.one(LOOKED)
        exporter.wait_until(
            lambda s: max(s.all(LOOKED), default=0.0) > last
        )  # the next look is two seconds away
        going = boot_time()
        exporter.release()
        left = exporter.folder / "finished" / token
        exporter.wait_until(lambda _: left.exists())
        found = sample.read_finished_claim(str(exporter.folder), token)
        assert found is not None
        (account,) = found.tokens[token].values()
        assert account.since is not None and account.until is not None
        assert claimed <= account.since <= going
        assert going <= account.until <= boot_time(), "the look after its end is billed to it"
        assert account.busy is not None and account.observed is not None
        lived = account.until - account.since
        assert lived - 4 <= account.observed <= lived + 1
        assert account.busy >= 0.9 * account.observed > 1


def test_an_exporter_that_is_killed_and_started_goes_on_where_it_was(tmp_path: Path) -> None:
    with (
        Double(tmp_path / "nvml", preset="dgx-h200", gpus=2) as nvml,
        Whole(tmp_path, nvml) as exporter,
    ):
        nvml.load(0, 100)
        exporter.up(2)
        exporter.claim(0)
        before = exporter.wait_until(
            lambda s: (
                max(s.all("gpulock_gpu_busy_seconds_total")) > 1 and s.all("gpulock_gpu_lock_info")
            )
        )
        counted = before.totals()
        assert len(counted) > 30
        exporter.process.kill()
        exporter.process.wait()
        exporter.start()
        after = exporter.wait_until(lambda found: found.totals().keys() >= counted.keys())
        for key, value in counted.items():
            assert after.values[key] >= value, key
        more = [after.totals()[key] - value for key, value in counted.items() if "busy" in key[0]]
        assert max(more) < 20, "time that nobody observed is in no counter"


def test_no_label_holds_a_command_an_environment_or_a_comment(tmp_path: Path) -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", f"--password={SECRET}"],
        env={"TOKEN": SECRET},
    )
    with (
        stranger,
        Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml,
        Whole(tmp_path, nvml) as exporter,
    ):
        try:
            nvml.processes(1, [Process(stranger.pid, "512M")])
            nvml.set("gpu0.name", 'Tesla "V100" \\ {x="y"}')
            exporter.up(2)
            store = LockStore(str(nvml.node / "run/gpulock"))
            exporter.claim(1)  # the first one makes the folders
            exporter.release()
            bus = sorted(os.listdir(nvml.node / "proc/driver/nvidia/gpus"))[0]
            written = record(user=USER, queue='all"q\\n', comment=SECRET, spool_dir=f"/x/{SECRET}")
            place_lock(store, bus, written)
            assert SECRET in owner.encode_owner(written)
            found = exporter.wait_until(
                lambda s: s.all("gpulock_gpu_lock_info", gpu="0") and foreign(s)
            )
            assert found.one("gpulock_gpu_lock_info", gpu="0", user=USER, queue='all"q\\n') == 1
            assert found.all("gpulock_gpu_info", gpu="0", name='Tesla "V100" \\ {x="y"}') == [1]
            for path in ("/metrics", "/", "/-/healthy", "/nothing"):
                answer = exporter.get(path)
                assert SECRET not in answer.text and "time.sleep" not in answer.text
            for file in exporter.folder.rglob("*"):
                assert not file.is_file() or SECRET not in file.read_text()
        finally:
            stranger.kill()


def foreign(found: Scrape) -> float:
    return sum(found.all("gpulock_gpu_foreign_processes", gpu="1"))
