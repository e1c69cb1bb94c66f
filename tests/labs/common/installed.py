# SPDX-License-Identifier: Apache-2.0
"""gpulock on the nodes of whatever lab: settings, locks, and what a test does to a node."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.node.context import Node
from gpulock.node.settings import parse_settings
from gpulock.store import quarantine
from gpulock.store.event_log import count_events, read_events
from gpulock.store.owner import Owner
from tests.labs.common import reaped
from tests.labs.common.cluster import Machines
from tests.labs.common.lock_folder import owners
from tests.labs.common.reaped import REPOSITORY, Reaped
from tests.support.wait import wait_until

CONFIG: Final = "/etc/gpulock/gpulock.conf"
LOCK_DIR: Final = "/run/gpulock"
CLAIMS: Final = "/run/gpulock.claims"
STATE_DIR: Final = "/var/lib/gpulock"
HOLD: Final = """
import fcntl, os, signal, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
os.kill(os.getpid(), signal.SIGSTOP)
"""
SOAK: Final = os.environ.get("GPULOCK_SOAK") == "1"  # full counts


@dataclass(frozen=True)
class Installed(ABC):
    """gpulock as installed on every node of a lab; `drivers` has a simulated driver for each."""

    drivers: Path

    @property
    @abstractmethod
    def cluster(self) -> Machines:
        """Return the lab."""

    @property
    @abstractmethod
    def nodes(self) -> tuple[str, ...]:
        """Return the names of its nodes."""

    def write_settings(self, node: str, **keys: str) -> None:
        """Write a node's settings: these, and where its driver is."""
        tree = self.drivers / node
        driver = {"DRIVER_ROOT": tree / "proc/driver/nvidia", "SYS_ROOT": tree / "sys"}
        all_keys = {**driver, "DEV_ROOT": tree / "dev", **keys}
        place = self.cluster.path_in(node, CONFIG)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(f"{key}={value}\n" for key, value in all_keys.items()))

    def forget(self, node: str) -> None:
        """Leave no lock, no record and no state on a node."""
        for folder in (LOCK_DIR, CLAIMS, STATE_DIR):
            empty(self.cluster.path_in(node, folder))

    def locks(self, node: str) -> dict[str, Owner]:
        """Return the owner of every lock of a node."""
        return owners(self.cluster.path_in(node, "/run/gpulock/locks"))

    def held_by(self, job: int) -> dict[str, list[str]]:
        """Return the devices a job holds, by node."""
        return {
            node: [name for name, record in self.locks(node).items() if record.job_id == str(job)]
            for node in self.nodes
        }

    def record_of(self, node: str, job: int) -> Owner:
        """Return the record of one lock of a job."""
        return next(one for one in self.locks(node).values() if one.job_id == str(job))

    def wait_free(self) -> None:
        """Wait until no node has a lock."""
        wait_until(
            lambda: not any(self.locks(node) for node in self.nodes), why="all locks to be gone"
        )

    def command(self, node: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `gpulock` as root on a node."""
        return self.command_below(node, (), *words)

    def told(self, node: str, *words: str) -> str:
        """Run `gpulock` as root on a node, well; return what it printed."""
        done = self.command(node, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def command_below(
        self, node: str, around: Sequence[str], *words: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `gpulock` as root on a node; `around` are words before it, such as `nsenter -m`."""
        start = "from gpulock.cli import main; main()"
        line = [*around, sys.executable, "-c", start, "--config", CONFIG, *words]
        return self.cluster.run_in(node, line, env={"PYTHONPATH": str(REPOSITORY)})

    def node(self, name: str) -> Node:
        """Return a node as its own root would see it, for use inside this process."""
        settings = parse_settings(self.cluster.path_in(name, CONFIG).read_text(), CONFIG)
        settings.lock_dir = str(self.cluster.path_in(name, "/run/gpulock"))
        settings.state_dir = str(self.cluster.path_in(name, "/var/lib/gpulock"))
        return Node(settings, name)


def reap(gpus: Installed, node: str, *around: str) -> Reaped:
    """Reconcile on a node; `around` are words before the command, such as `unshare --pid`."""
    line = [*around, *reaped.command(CONFIG)]
    return reaped.reaped(gpus.cluster.run_in(node, line, env=reaped.ENV))


def totals(gpus: Installed, node: str) -> dict[str, str]:
    """Return the counters of a node."""
    lock_dir = str(gpus.cluster.path_in(node, "/run/gpulock"))
    return {key: f"{value:g}" for key, value in count_events(read_events(lock_dir)).items()}


def out_of_service(state_dir: str) -> dict[str, str]:
    """Return why each device of a node is out of service, by lock id."""
    folder = quarantine.QUARANTINE
    names = quarantine.list_noted_devices(state_dir, folder)
    return {
        name: quarantine.read_device_note(state_dir, folder, name).get("reason", "")
        for name in names
    }


def empty(folder: Path) -> None:
    """Remove all that is in a folder."""
    for place in folder.iterdir():
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()


def lose_locks(gpus: Installed, node: str) -> None:
    """Empty a node's LOCK_DIR, as an administrator does who clears stuck locks."""
    empty(gpus.cluster.path_in(node, LOCK_DIR))


def lose_locks_and_records(gpus: Installed, node: str) -> None:
    """Empty a node's LOCK_DIR and CLAIMS, as a reboot does."""
    for folder in (LOCK_DIR, CLAIMS):
        empty(gpus.cluster.path_in(node, folder))


def script(gpus: Installed, name: str, text: str) -> Path:
    """Write a program into the lab's scratch folder; return its path."""
    path = gpus.cluster.lab / "programs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def variables(text: str) -> dict[str, str]:
    """Return the variables in what `env` printed."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def gate_file(gpus: Installed, name: str, user: str = "") -> Path:
    """Return a file in a user's home for which jobs wait, not there yet; the first user's."""
    users = gpus.cluster.users
    path = users[user or next(iter(users))].home / name
    path.unlink(missing_ok=True)
    return path


def waiting_for(path: Path | str) -> str:
    """Return lines of bash that wait for a file, without a child that could be left behind."""
    return f"exec 9<> <(:)\nuntil [ -e {path} ]; do read -rt 0.1 -u 9 || :; done\n"


@contextlib.contextmanager
def shut_gate(gpus: Installed, node: str) -> Generator[None]:
    """Hold a node's gate by a process that is stopped."""
    gate = gpus.cluster.path_in(node, f"{CLAIMS}/gate")
    with subprocess.Popen([sys.executable, "-IS", "-c", HOLD, str(gate)]) as holder:
        try:
            stopped = Path(f"/proc/{holder.pid}/status")
            wait_until(lambda: "\nState:\tT" in stopped.read_text(), why="the gate to be held")
            yield
        finally:
            holder.kill()


def mount(gpus: Installed, node: str, *words: str) -> None:
    """Mount something on one node."""
    done = gpus.cluster.run_in(node, ["mount", *words])
    assert done.returncode == 0, done.stderr


def umount(gpus: Installed, node: str, place: str) -> None:
    """Take a mount of one node away, though processes use it."""
    done = gpus.cluster.run_in(node, ["umount", "-l", place])
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def mounted(gpus: Installed, node: str, place: str, *words: str) -> Generator[None]:
    """Mount something over a place of one node."""
    mount(gpus, node, *words, place)
    try:
        yield
    finally:
        umount(gpus, node, place)


@contextlib.contextmanager
def other_boot(gpus: Installed, node: str) -> Generator[None]:
    """Let a node have another boot id, as after a reboot."""
    fake = gpus.cluster.lab / f"boot_id.{node}"
    fake.write_text("0b00b00b-0000-4000-8000-000000000001\n")
    with mounted(gpus, node, "/proc/sys/kernel/random/boot_id", "--bind", str(fake)):
        yield
