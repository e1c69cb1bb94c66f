# SPDX-License-Identifier: Apache-2.0
"""A GPU of a lab's node on its way from one job to the next, as a real exporter sees it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpulock.daemon.health.card_checks import MIB
from gpulock.node.devices import Device
from gpulock.node.sample import DeviceSample, Sample
from gpulock.store.locks import LockStore
from tests.labs.common.exporter_node import Observer, exporter
from tests.labs.common.installed import Installed, out_of_service
from tests.labs.daemon.daemon_lab import Daemon
from tests.nvml.double import Process
from tests.support.wait import wait_ended, wait_until

USED, LEFT = 3072, 812  # MiB: of a job at work, and when its process is gone
KEYS: Mapping[str, str] = {
    "LEFTOVER_PROCESSES": "kill",
    "SAMPLE_PERIOD": "0.4",
    "QUARANTINE_ON": "memory",
}


class Job:
    """A job of one GPU that works until its end is called; `over` waits for its epilog too."""

    def __init__(
        self, number: int, device: str, pid: int, go: Path, over: Callable[[], object]
    ) -> None:
        self.number = number
        self.device = device
        self.pid = pid
        self.over = over
        self._go = go

    def end(self) -> None:
        """Let its process end."""
        self._go.touch()
        wait_ended([self.pid], why="the job's process to end")


class Gpus:
    """The GPUs of one node; `root` is its file system, `devices` what its driver shows."""

    def __init__(self, seen_by: Observer, root: Path, devices: Sequence[Device]) -> None:
        self.observer = seen_by
        self._nvml = seen_by.nvml
        self._lock_dir = root / "run/gpulock"
        self._state_dir = str(root / "var/lib/gpulock")
        self._index = {device.id: device.index for device in devices}

    # --- what they do -------------------------------------------------------------------------

    def work(self, job: Job) -> Job:
        """Let a job's process use memory, and wait until the exporter has told so."""
        index = self._index[job.device]
        self._nvml.set(f"gpu{index}.memory.used", USED * MIB)
        self._nvml.processes(index, [Process(job.pid, f"{USED}M")])

        def told() -> bool:
            seen = self.seen(job.device)
            return (seen.memory_used, seen.processes) == (USED * MIB, 1)

        wait_until(told, why=f"the exporter to tell of process {job.pid} on {job.device}")
        return job

    def rest(self, device: str, mib: int) -> None:
        """Let no process be there, and so much memory stay in use."""
        index = self._index[device]
        self._nvml.set(f"gpu{index}.memory.used", mib * MIB)
        self._nvml.processes(index, [])

    # --- what is known of them ----------------------------------------------------------------

    def seen(self, device: str) -> DeviceSample:
        """Return what the exporter told last of a device."""
        found = self.observer.sample()
        assert found is not None
        return found.devices[device]

    def locks(self) -> dict[str, bool]:
        """Return the devices that are locked, and of each whether its job is over."""
        held = LockStore(str(self._lock_dir)).read_all_locks()
        return {
            name: lock.owner is not None and lock.owner.draining == 1 for name, lock in held.items()
        }

    def out(self) -> dict[str, str]:
        """Return why each device that is out of service is so."""
        return out_of_service(self._state_dir)


def assert_freed(gpus: Gpus, job: Job, left: int) -> None:
    """Let a job end, and so much memory stay in use: its epilog frees the device at once."""
    job.end()
    gpus.rest(job.device, left)
    job.over()
    assert gpus.locks() == {}
    assert gpus.out() == {}


def assert_put_away(gpus: Gpus, job: Job, daemon: Daemon) -> None:
    """Let gpulockd find memory in use and nobody there: the device goes out of service."""
    wait_out(gpus, daemon, {job.device: f"memory: {LEFT} MiB are in use without a process"})
    assert gpus.locks() == {}


def wait_out(gpus: Gpus, daemon: Daemon, reason: Mapping[str, str]) -> None:
    """Wait until gpulockd has just these devices out of service, for these reasons."""
    daemon.rounds_until(lambda: gpus.out() == reason, f"{reason} to be out")
    daemon.goes_round()  # what put one out is over, and has freed it


@contextmanager
def observed(gpus: Installed, node: str, place: Path) -> Generator[Gpus]:
    """Observe a node whose settings have `KEYS`; `place` is for what the exporter hears."""
    devices = gpus.node(node).devices()

    def all_of_them(told: Sample) -> bool:
        return {device.id for device in devices} <= set(told.devices)

    with exporter(gpus, node, place, all_of_them) as found:
        yield Gpus(found, gpus.cluster.path_in(node, "/"), devices)
