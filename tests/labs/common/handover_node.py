# SPDX-License-Identifier: Apache-2.0
"""A GPU of a lab's node on its way from one job to the next, as a real exporter sees it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpulock.alloc.memory_check import MEMORY_NOT_REPORTED, MIB
from gpulock.deadline import clock_boottime
from gpulock.node.devices import Device
from gpulock.node.sample import DeviceSample, Sample
from tests.labs.common.exporter_node import Observer, exporter
from tests.labs.common.installed import Installed, out_of_service
from tests.labs.common.lock_folder import owners
from tests.labs.common.reaped import Reaped
from tests.labs.daemon.daemon_lab import Daemon
from tests.nvml.double import ERROR_UNKNOWN, Process
from tests.support.wait import wait_ended, wait_until

USED, LEFT = 3072, 812  # MiB: of a job at work, and when its process is gone
SAMPLE_PERIOD = 3.0  # seconds: an epilog waits for two of them
OLDEST = 25.0  # seconds, of a sample; an epilog is over sooner, on a busy machine too
LISTS = "nvmlDeviceGet*RunningProcesses*"
KEYS: Mapping[str, str] = {
    "LEFTOVER_PROCESSES": "kill",
    "SAMPLE_PERIOD": str(SAMPLE_PERIOD),
    "PROCESS_PERIOD": "1",
    "RESTORE_AFTER": "2",
    "MAX_SAMPLE_AGE": str(OLDEST),
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

    @contextmanager
    def unlisted(self) -> Generator[None]:
        """Let NVML fail to list processes: the exporter goes on telling what it listed last."""
        self._nvml.fail(LISTS, ERROR_UNKNOWN)
        yield
        self._nvml.fail(LISTS, 0)

    # --- what is known of them ----------------------------------------------------------------

    def seen(self, device: str) -> DeviceSample:
        """Return what the exporter told last of a device."""
        found = self.observer.sample()
        assert found is not None
        return found.devices[device]

    def wait_stale(self) -> None:
        """Wait until the last sample is too old to be believed."""
        found = self.observer.sample()
        assert found is not None and found.boottime is not None
        written = found.boottime
        wait_until(lambda: clock_boottime() - written > OLDEST, why="the last sample to be old")

    def locks(self) -> dict[str, bool]:
        """Return the devices that are locked, and of each whether its job is over."""
        return {name: one.draining == 1 for name, one in owners(self._lock_dir / "locks").items()}

    def out(self) -> dict[str, str]:
        """Return why each device that is out of service is so."""
        return out_of_service(self._state_dir)

    def freed_as(self, device: str) -> str:
        """Return how a device was freed, as its claim's record says; gpulockd must not run."""
        (place,) = (self._lock_dir / "released").glob(f"*.{device}")
        lines = (place / "released").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)["how"]


def assert_given_back(gpus: Gpus, job: Job) -> None:
    """Let a job end whose memory is given back a moment later: its epilog frees the device."""
    with gpus.unlisted():
        job.end()
        gpus.rest(job.device, 0)
        job.over()
    assert gpus.locks() == {}
    assert gpus.freed_as(job.device) == "epilog"
    assert gpus.out() == {}


def assert_waits(gpus: Gpus, job: Job) -> None:
    """Let a job end whose memory stays in use: its device waits for who may be there."""
    with gpus.unlisted():
        job.end()
        gpus.rest(job.device, LEFT)
        job.over()
        assert gpus.locks() == {job.device: True}
        assert gpus.out() == {}


def assert_put_away(gpus: Gpus, job: Job, daemon: Daemon) -> None:
    """Let gpulockd find nobody there: the device goes out of service, with the reason."""
    wait_out(gpus, daemon, {job.device: f"memory: {LEFT} MiB stay in use after job {job.number}"})
    assert gpus.locks() == {}


def assert_untold(gpus: Gpus, first: Job, second: Job, reap: Callable[[], Reaped]) -> None:
    """Let the exporter be killed, and a job end at once and one when its last word is old."""
    gpus.observer.crash()
    first.end()
    first.over()
    assert gpus.locks() == {first.device: True, second.device: False}, "that look is an older one"
    gpus.wait_stale()
    second.end()
    second.over()
    assert gpus.freed_as(second.device) == f"epilog{MEMORY_NOT_REPORTED}"
    assert {act for act, _ in reap().acts()} == {"freed"}
    how = gpus.freed_as(first.device)
    assert how.startswith("reap: ") and how.endswith(MEMORY_NOT_REPORTED)
    assert gpus.out() == {}


def wait_out(gpus: Gpus, daemon: Daemon, reason: Mapping[str, str]) -> None:
    """Wait until gpulockd has just these devices out of service, for these reasons."""
    daemon.rounds_until(lambda: gpus.out() == reason, f"{reason} to be out")
    daemon.goes_round()  # what put one out is over, and has freed it


@contextmanager
def observed(gpus: Installed, node: str, place: Path) -> Generator[Gpus]:
    """Observe a node whose settings have `KEYS`, and `place/exporter` as EXPORTER_DIR."""
    devices = gpus.node(node).devices()

    def all_of_them(told: Sample) -> bool:
        return {device.id for device in devices} <= set(told.devices)

    with exporter(gpus, node, place, all_of_them) as found:
        yield Gpus(found, gpus.cluster.path_in(node, "/"), devices)
