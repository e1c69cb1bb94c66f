# SPDX-License-Identifier: Apache-2.0
"""The double in processes of their own: hangs, crashes, libraries of old drivers, no driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulock.simulate.node import write_simulated_node
from tests.nvml.double import Double, Hang
from tests.support.wait import let_work, wait_until

pytestmark = pytest.mark.slow
NEW = "610.43.02"
TEMPERATURE = "nvmlDeviceGetTemperature"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a workstation with two cards."""
    return write_simulated_node(tmp_path_factory.mktemp("node") / "n", "workstation").directory


@pytest.fixture
def nvml(tmp_path: Path, pair: Path) -> Iterator[Double]:
    with Double(tmp_path / "nvml", node=pair, driver=NEW) as double:
        yield double


def command(program: str) -> list[str]:
    """Return a client: `t(n)` asks card n for its temperature; errors are printed by number."""
    return [
        sys.executable,
        "-Wignore",
        "-c",
        "import pynvml as p\n"
        "def t(n):\n"
        "    return p.nvmlDeviceGetTemperature(p.nvmlDeviceGetHandleByIndex(n), 0)\n"
        "try:\n"
        f"    {program}\n"
        "except p.NVMLError as e:\n"
        "    print('error', e.value)\n",
    ]


def ask(double: Double, program: str) -> str:
    """Run a client to its end; return what it printed, or the signal that killed it."""
    done = subprocess.run(
        command(program),
        env={**os.environ, **double.env},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.stdout.strip() if done.returncode == 0 else f"died of {done.returncode}"


@contextmanager
def client(double: Double, program: str) -> Generator[subprocess.Popen[str]]:
    """Start a client that prints `ready` first; kill it at the end."""
    with subprocess.Popen(
        command(f"p.nvmlInit(); print('ready', flush=True); {program}"),
        env={**os.environ, **double.env},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            double.reset()  # else one that is undead stays so
            process.kill()


def state(process: subprocess.Popen[str]) -> str:
    """Return the letter of a process's state, as the kernel shows it."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def stays(process: subprocess.Popen[str], letter: str) -> bool:
    """Return whether a process is in this state and stays there: a disk makes D for an instant."""
    for _ in range(5):
        if state(process) != letter:
            return False
        let_work(0.01)
    return True


def test_a_call_that_sleeps_ends_with_the_process_or_with_the_rule(nvml: Double) -> None:
    nvml.hang(TEMPERATURE, gpu=1)
    with client(nvml, "print(t(0), flush=True); print(t(1))") as process:
        assert process.stdout is not None and process.stdout.readline() == "43\n"
        wait_until(lambda: nvml.calls()[TEMPERATURE] == 2, why="the second call")
        assert process.poll() is None
        nvml.set("gpu1.temperature", 77)  # any change is looked at, but the rule still stands
        nvml.unset(f"gpu1.hang.{TEMPERATURE}")
        assert process.stdout.readline() == "77\n"
    nvml.hang(TEMPERATURE, gpu=1)
    with client(nvml, "t(1)") as process:
        wait_until(lambda: nvml.calls()[TEMPERATURE] == 3, why="the third call")
        process.terminate()
        assert process.wait() == -signal.SIGTERM


@pytest.mark.parametrize("manner", ["deaf", "undead"])
def test_a_call_in_state_d_hears_no_signal_but_kill(nvml: Double, manner: Hang) -> None:
    nvml.hang(TEMPERATURE, manner)
    with client(nvml, "t(0)") as process:
        wait_until(
            lambda: nvml.calls()[TEMPERATURE] == 1 and stays(process, "D"), why="the state D"
        )
        process.terminate()
        process.send_signal(signal.SIGINT)
        assert stays(process, "D")
        process.kill()
        if manner == "undead":
            wait_until(lambda: stays(process, "Z"), why="a zombie")
            assert process.poll() is None  # dead, and nobody can reap it
            nvml.unset(f"hang.{TEMPERATURE}")
        assert process.wait() == -signal.SIGKILL


def test_a_call_kills_its_process(nvml: Double) -> None:
    nvml.crash(TEMPERATURE, signal.SIGSEGV, gpu=1)
    assert ask(nvml, "p.nvmlInit(); print(t(0))") == "43"
    assert ask(nvml, "p.nvmlInit(); print(t(1))") == "died of -11"


def test_a_client_that_holds_the_library_is_seen_and_gone_with_its_death(nvml: Double) -> None:
    assert not nvml.held()
    with client(nvml, "import time; time.sleep(60)") as process:
        assert nvml.held()
        process.kill()
        process.wait()
        assert not nvml.held()
    assert ask(nvml, "p.nvmlInit(); p.nvmlShutdown()") == "" and not nvml.held()


def test_a_function_can_be_missing(tmp_path: Path, pair: Path) -> None:
    with Double(tmp_path / "nvml", node=pair, driver=NEW, hidden=[TEMPERATURE]) as double:
        assert ask(double, "p.nvmlInit(); t(0)") == "error 13"
        assert ask(double, "p.nvmlInit(); print(p.nvmlDeviceGetCount())") == "2"


def test_the_library_of_an_old_driver_lacks_what_came_later(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="k80-node", gpus=1) as double:
        h = "p.nvmlInit(); h = p.nvmlDeviceGetHandleByIndex(0); "
        assert ask(double, f"{h}print(p.nvmlDeviceGetPowerUsage(h))") == "30000"
        assert ask(double, f"{h}print(p.nvmlDeviceGetTotalEnergyConsumption(h))") == "error 3"
        assert ask(double, f"{h}p.nvmlDeviceGetComputeRunningProcesses_v3(h)") == "error 13"
        assert ask(double, f"{h}p.nvmlDeviceGetMigMode(h)") == "error 13"
        assert ask(double, f"{h}p.nvmlDeviceGetMemoryInfo(h, p.nvmlMemory_v2)") == "error 13"
        program = f"{h}print([v.nvmlReturn for v in p.nvmlDeviceGetFieldValues(h, [83, 197, 230])])"
        assert ask(double, program) == "[3, 3, 3]"
