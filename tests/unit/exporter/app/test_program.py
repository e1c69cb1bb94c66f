# SPDX-License-Identifier: Apache-2.0
"""gpulock-exporter as a program: its options, its folder, its service manager."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpulock_exporter.app.program import (
    apply_exporter_options,
    exporter_parser,
    worker_command,
)

from gpulock.node.settings import Settings, parse_settings
from gpulock.simulate.node import write_simulated_node
from tests.exporter.whole import PROGRAM, ROOT, UTILISATION, Whole
from tests.nvml.double import Double
from tests.support.wait import wait_until

pytestmark = pytest.mark.slow

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"}
SHORT = {"SAMPLE_PERIOD": "0.2"}
UP, LOOKED, SUCCESS = (
    f"gpulock_{name}" for name in ("nvml_up", "sample_timestamp_seconds", "collector_success")
)
FULL = """
import errno, gpulock.store.atomic
def write_descriptor(fd, data):
    raise OSError(errno.ENOSPC, "No space left on device")
gpulock.store.atomic.write_descriptor = write_descriptor
"""
DEAF = """
from gpulock_exporter.app import program
def die(self):
    raise MemoryError("cannot accept")
program.HttpServer._run = die
"""


def call(config: Path, *words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, "-c", before + PROGRAM, "--config", str(config), *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def configured(root: Path, *lines: str) -> Path:
    """Return the settings of a simulated node, with these lines behind its own."""
    config = write_simulated_node(root / "node", "dgx1").config
    config.write_text("\n".join([config.read_text(), *lines]) + "\n")
    return config


def settings_of(*lines: str) -> Settings:
    return parse_settings("\n".join(lines), "the.conf")


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[Double]:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as found:
        yield found


@pytest.fixture
def exporter(tmp_path: Path, nvml: Double) -> Iterator[Whole]:
    with Whole(tmp_path, nvml, settings=SHORT) as found:
        found.up(2)
        yield found


def test_a_second_exporter_does_not_write_into_the_files_of_the_first(exporter: Whole) -> None:
    being_written = exporter.folder / ".sample.0a1b"
    being_written.touch()
    done = call(exporter.config, "--listen", "127.0.0.1:0")
    assert done.returncode == 3
    assert being_written.exists()
    assert done.stderr == (
        f"gpulock-exporter: another gpulock-exporter writes {exporter.folder}; "
        "give this one a folder of its own (--folder)\n"
    )
    assert exporter.get("/-/healthy").text == "gpulock-exporter is healthy\n"


def test_an_exporter_without_room_for_its_files_serves_without_them_and_names_one(
    tmp_path: Path, nvml: Double
) -> None:
    with Whole(tmp_path, nvml, settings=SHORT, before=FULL) as exporter:
        found = exporter.wait_until(lambda s: s.all(UTILISATION))
        assert found.one(SUCCESS, collector="files") == 0
    where = f"[Errno 28] No space left on device: '{exporter.folder}/sample'"
    assert f"gpulock-exporter: files: {where}\n" in exporter.errors.read_text()


def test_a_folder_that_is_removed_is_made_again(exporter: Whole) -> None:
    exporter.process.send_signal(signal.SIGHUP)  # which ends none that no terminal runs
    shutil.rmtree(exporter.folder)
    wait_until((exporter.folder / "sample").exists, why="a sample")
    assert (exporter.folder / "sample").read_text().startswith("gpulock-sample 1\n")
    exporter.wait_until(lambda s: s.all(SUCCESS, collector="files") == [1])
    assert call(exporter.config, "--listen", "127.0.0.1:0").returncode == 3, "it is held as before"


def test_where_a_service_manager_makes_the_folder_an_exporter_without_it_ends(
    tmp_path: Path, nvml: Double
) -> None:
    (tmp_path / "run").mkdir()
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "90000000"}
    own = {**SHORT, "LOCK_DIR": str(tmp_path / "run/gpulock")}
    with Whole(tmp_path, nvml, settings=own, env={**nvml.env, **told}) as exporter:
        exporter.up(2)
        (tmp_path / "run").rename(tmp_path / "away")
        exporter.ends = (3,)
        assert exporter.process.wait(60) == 3
        said = exporter.errors.read_text()
        assert said.endswith(f"gpulock-exporter: {tmp_path}/run/gpulock-exporter is gone\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("GUPS=8", "unknown key 'GUPS'; correct the file"),
        ("SAMPLE_PERIOD=30", "SAMPLE_PERIOD is 30, and the driver keeps 16 s"),
        ("WEB_CONFIG=/etc/hostname", "gpulock-exporter: /etc/hostname: this file is not a mapping"),
    ],
)
def test_what_is_not_obeyed_is_told(tmp_path: Path, line: str, said: str) -> None:
    done = call(configured(tmp_path, line), "--listen", "nowhere")
    assert (done.returncode, said in done.stderr) == (3, True)
    assert ("SAMPLE_PERIOD" in done.stderr) is line.startswith("SAMPLE")


def test_an_exporter_that_accepts_nobody_any_more_ends_so_that_it_is_started_again(
    tmp_path: Path,
) -> None:
    done = call(configured(tmp_path), "--listen", "127.0.0.1:0", before=DEAF)
    assert done.returncode == 3
    assert "MemoryError: cannot accept" in done.stderr


def test_an_option_counts_before_the_file_and_the_file_before_the_default() -> None:
    lines, words = ("EXPORTER_LISTEN=:1 :2", "LOCK_DIR=/d"), ["--listen", ":3", "--folder", "/e"]
    found = [
        apply_exporter_options(settings_of(*said), exporter_parser().parse_args(given))
        for said, given in (((), []), (lines, []), (lines, words))
    ]
    assert [(one.exporter_listen, one.exporter_dir) for one in found] == [
        ((":9465",), "/run/gpulock-exporter"),
        ((":1", ":2"), "/d-exporter"),
        ((":3",), "/e"),
    ]


def test_the_worker_looks_as_often_as_the_settings_say() -> None:
    assert worker_command(settings_of())[-3:] == ["1.0", "10.0", "nvml"]
    own = worker_command(settings_of("SAMPLE_PERIOD=0.5", "SIMULATION=/n/marker"))
    assert own[-3:] == ["0.5", "5.0", "simulated:/n"]
