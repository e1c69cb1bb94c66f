# SPDX-License-Identifier: Apache-2.0
"""The exporter's folder: each file is renamed in whole, by an ordinary user, without privileges.

`sample` once a second, `finished/TOKEN` once a claim, `inventory` when it changes. A folder that
cannot be written costs the rest of gpulock its advice, never the exporter its answers. One exporter
writes a folder at a time: it holds the file `lock`, which its user alone may open, since a reader's
flock would keep it from starting (facts/locking.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from gpulock.daemon.core.sample import (
    FINISHED,
    SAMPLE,
    SAMPLE_LINE,
    Sample,
    load_sample_file,
)
from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, LockTimeout, Refusal
from gpulock.node.device_list import INVENTORY_LINE
from gpulock.store import atomic, kv
from gpulock.store.gate import Gate
from gpulock.store.grants import FINISHED_CAP, FINISHED_PRUNE
from gpulock_exporter.files.sample_file import finished_text
from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.claim_accounting import Accounts
from gpulock_exporter.state.snapshot import Moment

INVENTORY, LOCK = "inventory", "lock"
WAITING_CAP = 64  # claims that could not be written yet
MIB = 1 << 20
SWITCH = "switch"  # the NVSwitches among the links of a device

Links = Mapping[str, Mapping[str, int]]


class ExporterFolder:
    """The files at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._waiting: dict[str, str] = {}
        self._inventory = ""
        self._gate: Gate | None = None

    def hold(self) -> None:
        """Hold the folder, also where it was removed meanwhile: then it is made again.

        Raises Refusal where another exporter writes it, or OSError.
        """
        if self._gate is not None and self._gate.is_named():
            return
        self.release()  # of a file that is gone
        self._make()
        gate = Gate(self.path, Deadline(0.0), name=LOCK)
        try:
            self._gate = gate.__enter__()
        except LockTimeout:
            raise Refusal(
                BROKEN,
                f"another gpulock-exporter writes {self.path}",
                "give this one a folder of its own (--folder)",
            ) from None

    def release(self) -> None:
        """Let another exporter write the folder."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.__exit__()

    def _make(self) -> None:
        for folder in (self.path, f"{self.path}/{FINISHED}"):
            try:
                os.mkdir(folder, 0o755)
            except FileExistsError:
                pass

    def open(self) -> None:
        """Make the folders, take away what an interrupted write left; raise OSError.

        Only for who holds it: a file that another exporter is writing looks the same.
        """
        self._make()
        for folder in (self.path, f"{self.path}/{FINISHED}"):
            for name in os.listdir(folder):
                if name.startswith("."):
                    atomic.remove_quietly(f"{folder}/{name}")

    def last(self) -> Sample | None:
        """Return the sample that was written last, None where there is none."""
        return load_sample_file(f"{self.path}/{SAMPLE}", SAMPLE_LINE)

    def write_sample(self, text: str) -> None:
        """Put a sample in the place of the last one; raise OSError.

        Where it cannot, that one goes: of counters served since, an exporter that went on from it
        would serve less.
        """
        try:
            self._replace(SAMPLE, text)
        except OSError:
            atomic.remove_quietly(f"{self.path}/{SAMPLE}")
            raise

    def write_finished(self, over: Mapping[str, Accounts], boot_id: str, now: Moment) -> None:
        """Write the accounts of claims that are over; raise OSError, and try again next time."""
        for token, accounts in over.items():
            self._waiting[token] = finished_text(token, accounts, boot_id, now)
        for token in list(self._waiting)[: max(0, len(self._waiting) - WAITING_CAP)]:
            del self._waiting[token]
        written = False
        for token, text in list(self._waiting.items()):
            self._replace(f"{FINISHED}/{token}", text)
            del self._waiting[token]
            written = True
        if written:
            prune_finished_files(f"{self.path}/{FINISHED}")

    def write_inventory(self, devices: Mapping[str, DeviceTelemetry], boot_id: str) -> None:
        """Write what NVML tells of the devices, where it changed or is gone; raise OSError."""
        text = inventory_text(devices, boot_id)
        if text != self._inventory or not os.path.exists(f"{self.path}/{INVENTORY}"):
            self._replace(INVENTORY, text)
            self._inventory = text

    def _replace(self, name: str, text: str) -> None:
        """Put a text in the place of a file; raise OSError that names the file."""
        path = f"{self.path}/{name}"
        try:
            atomic.replace_file(path, text.encode("utf-8", "surrogateescape"))
        except OSError as fault:  # a write that fails names nothing
            raise OSError(fault.errno, fault.strerror, path) from None


def prune_finished_files(folder: str, cap: int = FINISHED_CAP, drop: int = FINISHED_PRUNE) -> None:
    """Forget the oldest claims once there are too many."""
    names = os.listdir(folder)
    if len(names) < cap:
        return
    ages: list[tuple[float, str]] = []
    for name in names:
        try:
            ages.append((os.lstat(f"{folder}/{name}").st_mtime, name))
        except FileNotFoundError:
            continue  # root has taken it into the history meanwhile
    for _, name in sorted(ages)[:drop]:
        atomic.remove_quietly(f"{folder}/{name}")


def inventory_text(devices: Mapping[str, DeviceTelemetry], boot_id: str) -> str:
    """Return what only NVML can tell of the devices, as `gpulock.node.device_list` reads it.

    `read_device` has cleaned them. In MIG mode a card's NVLinks are off.
    gpulockd reads it first, and publishes in LOCK_DIR what agrees with the driver.
    """
    pairs = [("boot_id", boot_id)]
    for _, device in sorted(devices.items()):
        key = f"{'gpu' if device.gi is None else 'mig'}.{device.lock_id}"
        memory = str(device.memory_total // MIB) if device.memory_total else ""
        said = {"uuid": device.uuid, "profile": device.profile, "memory_mib": memory}
        if device.gi is None:
            said["mig"] = "1" if device.mig else "0"
            switched = not device.mig and (device.links or {}).get(SWITCH)
            said["nvswitch"] = "1" if switched else ""
        pairs += [(f"{key}.{name}", value) for name, value in said.items() if value]
    whole = [device for device in devices.values() if not device.mig and device.gi is None]
    pairs += inventory_link_pairs({device.bus: device.links or {} for device in whole})
    return f"{INVENTORY_LINE}\n{kv.encode_pairs(pairs)}"


def inventory_link_pairs(links: Links) -> Iterator[tuple[str, str]]:
    """Yield each pair of cards that is joined, once; of two counts the smaller."""
    for bus, of in sorted(links.items()):
        for peer, count in sorted(of.items()):
            if peer in links and bus < peer and len(bus) == len(peer):
                joined = min(count, links[peer].get(bus, count))
                if joined:
                    yield f"link.{bus}.{peer}", str(joined)
