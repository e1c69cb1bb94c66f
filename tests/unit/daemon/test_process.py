# SPDX-License-Identifier: Apache-2.0
"""gpulockd as a process: it ends when it is told to, whatever it is at, and there is one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.deadline import Deadline
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.store.gate import Gate
from gpulock.store.locks import LockStore

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
MAIN = f"""\
import sys
sys.path[:0] = [{str(ROOT)!r}, {sysconfig.get_path("purelib")!r}]
from gpulock.daemon.app import main
sys.exit(main())
"""
IMPATIENT = "from gpulock.store import gate\ngate.LONGEST_WAIT = 0.05\n"
SECONDS = 20  # that nothing should come near to


class Started:
    """A simulated node, a service manager that listens, and gpulockds."""

    def __init__(self, root: Path) -> None:
        self.simulated = write_simulated_node(root / "node", "dgx1")
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(root / "notify"))
        self.manager.settimeout(SECONDS)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *words: str, watchdog: str = "", program: str = MAIN) -> subprocess.Popen[str]:
        """Start a gpulockd."""
        argv = [sys.executable, "-IS", "-c", program, *(words or self.config())]
        env = {"NOTIFY_SOCKET": self.manager.getsockname(), "WATCHDOG_USEC": watchdog}
        started = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)
        self.processes.append(started)
        return started

    def config(self) -> list[str]:
        return ["--config", str(self.simulated.config)]

    def wait_for(self, word: str) -> str:
        """Wait until the service manager is told something; return the message."""
        while True:
            message = self.manager.recv(4096).decode()
            if message.startswith(word):
                return message

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.manager.close()


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(field: Started, number: int) -> None:
    daemon = field.start()
    field.wait_for("READY=1")
    daemon.send_signal(number)
    field.wait_for("STOPPING=1")
    assert daemon.wait(SECONDS) == 0


def test_a_signal_ends_it_while_it_waits_at_the_gate(field: Started) -> None:
    daemon = field.start()
    field.wait_for("READY=1")
    with Gate(str(field.simulated.lock_dir), Deadline(SECONDS)):
        daemon.send_signal(signal.SIGHUP)
        field.wait_for("RELOADING=1")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(SECONDS) == 0


def test_an_exit_that_takes_longer_than_its_patience_is_no_fault(field: Started) -> None:
    """On a busy machine an interpreter that ends takes its time."""
    Path(read_settings(str(field.simulated.config)).dev_root, "kmsg").touch()
    daemon = field.start(program=f"import atexit, time\natexit.register(time.sleep, 1.0)\n{MAIN}")
    field.wait_for("READY=1")
    daemon.send_signal(signal.SIGTERM)
    assert daemon.stderr is not None
    assert (daemon.wait(SECONDS), daemon.stderr.read()) == (0, "")


def test_the_second_says_who_runs(field: Started) -> None:
    first = field.start()
    field.wait_for("READY=1")
    second = field.start()
    assert second.wait(SECONDS) == 1
    assert second.stderr is not None
    assert f"runs already, pid {first.pid}" in second.stderr.read()
    assert first.poll() is None


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [((), 3, "gpulock.conf:1: not KEY=VALUE: 'green'"), (("--once",), 2, "usage: gpulockd")],
)
def test_bad_settings_or_words_end_the_start(
    field: Started, words: tuple[str, ...], code: int, why: str
) -> None:
    field.simulated.config.write_text("green\n")
    daemon = field.start(*words)
    assert daemon.stderr is not None
    assert (daemon.wait(SECONDS), why in daemon.stderr.read()) == (code, True)


def test_a_start_with_bad_settings_obeys_the_last_ones(field: Started) -> None:
    first = field.start()
    field.wait_for("READY=1")
    first.send_signal(signal.SIGTERM)
    first.wait(SECONDS)
    with field.simulated.config.open("a") as file:
        file.write("green\n")
    daemon = field.start()
    field.wait_for("READY=1")
    daemon.send_signal(signal.SIGTERM)
    assert daemon.stderr is not None
    assert (daemon.wait(SECONDS), "stay in force" in daemon.stderr.read()) == (0, True)


def test_it_waits_for_a_gate_that_is_shut_at_its_start(field: Started) -> None:
    """Ready it is all the same: a unit that never gets ready would be killed and started anew."""
    store = LockStore(str(field.simulated.lock_dir))
    store.check(make=True)
    with Gate(store, Deadline(SECONDS)):
        field.start(program=MAIN.replace("sys.exit", f"{IMPATIENT}sys.exit"))
        assert "timed out on the lock" in field.wait_for("READY=1")
    assert os.listdir(field.simulated.lock_dir)


def test_an_upgrade_beneath_it_changes_nothing_of_it(field: Started, tmp_path: Path) -> None:
    """A package's files are replaced while gpulockd runs: it imports none of the new ones."""
    package = tmp_path / "library/gpulock"
    shutil.copytree(ROOT / "gpulock", package, ignore=shutil.ignore_patterns("__pycache__"))
    config = field.simulated.config
    with config.open("a") as file:
        file.write(f"CDI_DIR={tmp_path}\n")
    daemon = field.start(program=MAIN.replace(repr(str(ROOT)), repr(str(package.parent))))
    field.wait_for("READY=1")
    for place in package.rglob("*.py"):
        place.write_text("raise SystemExit(f'{__name__} is another version')\n")
    for place in [*package.rglob("__pycache__")]:
        shutil.rmtree(place)

    with config.open("a") as file:
        file.write("SHARES=6:4\nSGE_COMPLEXES=gpu=card gpu.share=share\nIDLE_KILL=600\n")
    daemon.send_signal(signal.SIGHUP)
    field.wait_for("RELOADING=1")
    field.wait_for("READY=1")
    words = ["run", "-n", "2", "--", "true"]
    command = [sys.executable, "-c", "from gpulock.cli import main; main()", *field.config()]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    daemon.send_signal(signal.SIGHUP)
    field.wait_for("RELOADING=1")
    field.wait_for("READY=1")

    locks = field.simulated.lock_dir / "locks"
    assert list(locks.iterdir()) == []
    daemon.send_signal(signal.SIGTERM)
    assert daemon.stderr is not None
    assert (daemon.wait(SECONDS), "another version" in daemon.stderr.read()) == (0, False)
