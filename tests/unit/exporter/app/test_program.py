# SPDX-License-Identifier: Apache-2.0
"""gpulock-exporter as a whole, as a process, on a simulated node."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from gpulock_exporter.app.program import (
    apply_exporter_options,
    exporter_parser,
    worker_command,
)

from gpulock.node.settings import Settings, parse_settings
from gpulock.simulate.node import SimulatedNode, write_simulated_node
from tests.support.ports import ReservedPort
from tests.support.wait import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"}
SHORT: dict[str, object] = {"SAMPLE_PERIOD": "0.2"}
FULL = """
import errno, gpulock.store.atomic
def write_descriptor(fd, data):
    raise OSError(errno.ENOSPC, "No space left on device")
gpulock.store.atomic.write_descriptor = write_descriptor
"""
SHORT_PAUSE = """
from gpulock_exporter.app import folder
folder.LONGEST_PAUSE = 10.0
"""
CLIENT = "from gpulock_exporter.app.program import main; import sys; sys.exit(main())"


def call(node: SimulatedNode, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, "-c", CLIENT, "--config", str(node.config), *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def configure(node: SimulatedNode, **keys: object) -> None:
    """Set keys of the node's settings file in place of what they were."""
    lines = node.config.read_text().splitlines()
    kept = [line for line in lines if line.partition("=")[0] not in keys]
    node.config.write_text("\n".join([*kept, *(f"{k}={v}" for k, v in keys.items())]) + "\n")


def settings_of(*lines: str) -> Settings:
    return parse_settings("\n".join(lines), "the.conf")


class Running:
    """An exporter on a simulated DGX-1, with nothing but its settings file."""

    def __init__(
        self,
        root: Path,
        *,
        environment: Mapping[str, str] | None = None,
        before: str = "",
        **keys: object,
    ) -> None:
        self.node = write_simulated_node(root / "node", "dgx1")
        self.folder = self.node.exporter_dir
        self.reserved = ReservedPort()
        self.port = self.reserved.number
        configure(self.node, EXPORTER_LISTEN=f"127.0.0.1:{self.port}", **{**SHORT, **keys})
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + CLIENT, "--config", str(self.node.config)],
            env={**ENVIRONMENT, **(environment or {})},
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.reserved.release()
        self.process.terminate()
        self.process.communicate(timeout=60)

    def get(self, path: str) -> str:
        """Return what is answered, empty as long as nothing serves."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=20
            ) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return ""

    def wait(self, path: str, holds: Callable[[str], bool]) -> str:
        """Return the answer once it is as wanted."""
        seen = [""]

        def is_wanted() -> bool:
            seen[0] = self.get(path)
            return holds(seen[0])

        wait_until(is_wanted, why=lambda: f"{path}: {seen[0][-400:]!r}")
        return seen[0]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path) as found:
        yield found


def test_a_pause_ends_by_itself(tmp_path: Path) -> None:
    with Running(tmp_path, before=SHORT_PAUSE) as running:
        running.wait("/metrics", lambda t: "gpulock_nvml_up 1" in t)
        assert call(running.node, "pause").returncode == 0
        running.wait("/metrics", lambda t: "gpulock_nvml_up 0" in t)
        running.wait("/metrics", lambda t: "gpulock_nvml_up 1" in t)


def test_a_second_exporter_does_not_write_into_the_files_of_the_first(running: Running) -> None:
    running.wait("/-/healthy", bool)
    being_written = running.folder / ".sample.0a1b"
    being_written.touch()
    done = call(running.node, "--listen", "127.0.0.1:0")
    assert done.returncode == 3
    assert being_written.exists()
    assert done.stderr == (
        f"gpulock-exporter: another gpulock-exporter writes {running.folder}; "
        "give this one a folder of its own (--folder)\n"
    )
    assert running.get("/-/healthy") == "gpulock-exporter is healthy\n"
    assert call(running.node, "pause").returncode == 0, "the first is still the one to tell"


def test_an_exporter_without_room_for_its_files_serves_without_them_and_names_one(
    tmp_path: Path,
) -> None:
    with Running(tmp_path, before=FULL) as running:
        text = running.wait("/metrics", lambda t: "gpulock_gpu_utilization_ratio{" in t)
        assert 'gpulock_collector_success{collector="files"} 0' in text
        running.process.terminate()
        _, said = running.process.communicate(timeout=60)
        assert running.process.returncode == 0
        where = f"[Errno 28] No space left on device: '{running.folder}/sample'"
        assert f"gpulock-exporter: files: {where}\n" in said


def test_a_folder_that_is_removed_is_made_again(running: Running) -> None:
    running.wait("/metrics", lambda t: "gpulock_nvml_up 1" in t)
    shutil.rmtree(running.folder)
    wait_until((running.folder / "sample").exists, why="a sample")
    assert (running.folder / "sample").read_text().startswith("gpulock-sample 1\n")
    running.wait("/metrics", lambda t: 'gpulock_collector_success{collector="files"} 1' in t)
    assert call(running.node, "--listen", "127.0.0.1:0").returncode == 3, "it is held as before"
    assert call(running.node, "pause").returncode == 0


def test_where_a_service_manager_makes_the_folder_an_exporter_without_it_ends(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "90000000"}
    with Running(tmp_path, environment=told, LOCK_DIR=tmp_path / "run/gpulock") as running:
        running.wait("/metrics", lambda t: "gpulock_nvml_up 1" in t)
        (tmp_path / "run").rename(tmp_path / "away")
        _, said = running.process.communicate(timeout=60)
        assert running.process.returncode == 3
        assert said.endswith(f"gpulock-exporter: {tmp_path}/run/gpulock-exporter is gone\n")


def test_resume_without_an_exporter_is_refused(tmp_path: Path) -> None:
    done = call(write_simulated_node(tmp_path / "node", "dgx1"), "resume")
    assert (done.returncode, "none runs" in done.stderr) == (1, True)


def test_a_hang_up_does_not_end_the_exporter(running: Running) -> None:
    running.wait("/metrics", lambda text: "gpulock_nvml_up 1" in text)
    running.process.send_signal(signal.SIGHUP)
    before = running.get("/metrics")
    running.wait("/metrics", lambda text: sample_time(text) > sample_time(before))


def sample_time(text: str) -> float:
    """Return when the driver answered last."""
    return float(text.partition("\ngpulock_sample_timestamp_seconds ")[2].partition("\n")[0])


def test_settings_that_are_not_obeyed_are_told(tmp_path: Path) -> None:
    node = write_simulated_node(tmp_path / "node", "dgx1")
    with node.config.open("a") as file:
        file.write("GUPS=8\n")
    done = call(node, "resume")
    assert (done.returncode, "unknown key 'GUPS'; correct the file" in done.stderr) == (1, True)


def test_a_period_of_which_the_driver_forgets_a_part_is_told(tmp_path: Path) -> None:
    node = write_simulated_node(tmp_path / "node", "dgx1")
    configure(node, SAMPLE_PERIOD=15)
    assert "SAMPLE_PERIOD" not in call(node, "resume").stderr
    configure(node, SAMPLE_PERIOD=30)
    assert "SAMPLE_PERIOD is 30, and the driver keeps 16 s" in call(node, "resume").stderr


def test_an_option_counts_before_the_file_and_the_file_before_the_default() -> None:
    lines = ("EXPORTER_LISTEN=:1 :2", "WEB_CONFIG=/w", "LOCK_DIR=/d", "LABEL_USER=uid")
    words = ["--listen", ":3", "--web-config", "/v", "--folder", "/e", "--label-user", "none"]
    found = [
        apply_exporter_options(settings_of(*said), exporter_parser().parse_args(given))
        for said, given in (((), []), (lines, []), (lines, words))
    ]
    assert [
        (one.exporter_listen, one.web_config, one.exporter_dir, one.label_user) for one in found
    ] == [
        ((":9465",), "", "/run/gpulock-exporter", "name"),
        ((":1", ":2"), "/w", "/d-exporter", "uid"),
        ((":3",), "/v", "/e", "none"),
    ]


def test_the_worker_looks_as_often_as_the_settings_say() -> None:
    assert worker_command(settings_of())[-3:] == ["1.0", "10.0", "nvml"]
    own = worker_command(settings_of("SAMPLE_PERIOD=0.5", "SIMULATION=/n/marker"))
    assert own[-3:] == ["0.5", "5.0", "simulated:/n"]


def test_a_service_manager_hears_when_it_answers_and_that_it_lives(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        with Running(tmp_path, environment=told) as running:
            assert listener.recv(4096).decode() == (
                f"READY=1\nSTATUS=answers on 127.0.0.1:{running.port}"
            )
            assert running.get("/-/healthy"), "at once"
            for _ in range(3):
                assert listener.recv(4096) == b"WATCHDOG=1"


DEAF = """
import sys
from gpulock_exporter.app import program
def die(self):
    raise MemoryError("cannot accept")
program.HttpServer._run = die
sys.exit(program.main(["--config", sys.argv[1]]))
"""


def test_an_exporter_that_accepts_nobody_any_more_ends_so_that_it_is_started_again(
    tmp_path: Path,
) -> None:
    node = write_simulated_node(tmp_path / "node", "dgx1")
    configure(node, EXPORTER_LISTEN="127.0.0.1:0")
    done = subprocess.run(
        [sys.executable, "-c", DEAF, str(node.config)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3
    assert "MemoryError: cannot accept" in done.stderr
