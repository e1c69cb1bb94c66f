# SPDX-License-Identifier: Apache-2.0
"""A GPU of a lab's node on its way from one job to the next, as a real exporter sees it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpulock import owner, quarantine
from gpulock.deadline import boottime
from gpulock.devices import Device
from gpulock.handover import MIB
from gpulock.sample import Sample, Seen
from tests.labs.daemon_lab import Daemon
from tests.labs.exporter_node import Observer, exporter
from tests.labs.sge_wait import until
from tests.nvml.double import ERROR_UNKNOWN, Process

USED, LEFT = 3072, 812  # MiB: of a job at work, and when its process is gone
SAMPLE_PERIOD = 1.0  # seconds
OLDEST = 8.0  # seconds, of a sample; an epilog is over sooner
LISTS = "nvmlDeviceGet*RunningProcesses*"
KEYS: Mapping[str, str] = {
    "CLEAN": "kill",
    "SAMPLE_PERIOD": str(SAMPLE_PERIOD),
    "PROCESS_PERIOD": "1",
    "RESTORE_AFTER": "2",
    "MAX_SAMPLE_AGE": str(OLDEST),
}


class Gpus:
    """The GPUs of one node; `root` is its file system, `devices` what its driver shows."""

    def __init__(self, seen_by: Observer, root: Path, devices: Sequence[Device]) -> None:
        self.observer = seen_by
        self._nvml = seen_by.nvml
        self._lock_dir = root / "run/gpulock"
        self._state_dir = str(root / "var/lib/gpulock")
        self._index = {device.id: device.index for device in devices}

    # --- what they do -------------------------------------------------------------------------

    def work(self, device: str, pid: int) -> None:
        """Let a process of a job's use memory, and wait until the exporter has told so."""
        index = self._index[device]
        self._nvml.set(f"gpu{index}.memory.used", USED * MIB)
        self._nvml.processes(index, [Process(pid, f"{USED}M")])
        until(
            lambda: (self.seen(device).memory_used, self.seen(device).processes) == (USED * MIB, 1),
            what=f"the exporter to tell of process {pid} on {device}",
        )

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

    def seen(self, device: str) -> Seen:
        """Return what the exporter told last of a device."""
        found = self.observer.sample()
        assert found is not None
        return found.devices[device]

    def wait_stale(self) -> None:
        """Wait until the last sample is too old to be believed."""
        found = self.observer.sample()
        assert found is not None and found.boottime is not None
        written = found.boottime
        until(lambda: boottime() - written > OLDEST, what="the last sample to be old")

    def settling(self, device: str) -> bool:
        """Return whether a device's lock is one of a job that is over."""
        return owner.parse((self._lock_dir / "locks" / device / "owner").read_text()).settling == 1

    def out(self) -> dict[str, str]:
        """Return why each device that is out of service is so."""
        folder = quarantine.QUARANTINE
        names = quarantine.listed(self._state_dir, folder)
        return {n: quarantine.read(self._state_dir, folder, n)["because"] for n in names}

    def freed_as(self, device: str) -> str:
        """Return how a device was freed, as its claim's record says; gpulockd must not run."""
        (place,) = (self._lock_dir / "released").glob(f"*.{device}")
        lines = (place / "released").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)["how"]


def wait_out(gpus: Gpus, daemon: Daemon, because: Mapping[str, str]) -> None:
    """Wait until gpulockd has just these devices out of service, for these reasons."""

    def so() -> bool:
        daemon.goes_round()
        return gpus.out() == because

    until(so, what=f"{because} to be out", seconds=60, interval=0.5, why=daemon.said)


@contextmanager
def observed(
    place: Path, driver: Path, enter: Sequence[str], root: Path, devices: Sequence[Device]
) -> Generator[Gpus]:
    """Observe a node whose settings have `KEYS`, and `place/exporter` as EXPORTER_DIR."""

    def all_of_them(told: Sample) -> bool:
        return {device.id for device in devices} <= set(told.devices)

    with exporter(place, driver, enter, all_of_them) as found:
        yield Gpus(found, root, devices)
