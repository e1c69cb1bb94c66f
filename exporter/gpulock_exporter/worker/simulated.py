# SPDX-License-Identifier: Apache-2.0
"""A node of `gpulock simulate` as a source of frames: what NVML would tell of it.

The devices are those of its driver's files; the file `nvml` in the node's folder has what these do
not say, as `gpulock simulate` wrote it. One that is locked is at work, in waves, as long as the
lock lasts; a free one is idle. The file `telemetry` in the node's folder, if there is one, says
what is otherwise; it is read at each look, and its lists have commas:

    idle=0000:06:00.0               held, and doing nothing
    foreign=0000:0a:00.0:4711       a process on a device, by its lock id
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node import device_list, settings, settings_file
from gpulock.node.device_list import INVENTORY_LINE, mig_instances, nvlink_counts
from gpulock.node.devices import SHARE, Device
from gpulock.store import atomic, kv
from gpulock.store.locks import Lock, LockStore
from gpulock_exporter.frame import DeviceTelemetry, Frame

MIB = 1 << 20
AT_WORK = frozenset({"sge", "slurm", "process"})  # a reserve does nothing
OBSERVED = 16.0  # seconds that the driver's buffer of samples covers
PERIOD = 60.0  # seconds of a wave
MEMORY = 0.6  # of a device, in use by a job
WATTS = 60.0, 400.0  # idle, and at most
HOPPER = "NVIDIA H200"  # the one model with GPM: instances of others do not tell how busy they are
SWITCH_LINKS = 18
GPM = ("sm_active", "sm_occupancy", "tensor_active", "dram_active")
WELL: dict[str, Any] = {  # what a board tells, and which no job changes
    **{"persistence": True, "answer": 0.004, "pcie_replays": 0, "recovery_action": 0},
    **dict.fromkeys(("pcie_generation", "pcie_generation_max"), 4),
    **dict.fromkeys(("pcie_width", "pcie_width_max"), 16),
    **dict.fromkeys(("remap_pending", "remap_failure"), False),
    "ecc": {"corrected.dram": 0, "uncorrected.dram": 0},
    "remapped": {"correctable": 0, "uncorrectable": 0},
}

Work = dict[int, float]  # which part of a device each pid has; 0: nobody tells it


@dataclass
class CardTotals:
    """What a card counts, in seconds: all of them, and those under full load."""

    elapsed: float = 0.0
    worked: float = 0.0


class SimulatedSource:
    """The simulated node in `folder`: where frames come from, as from nvml.source."""

    def __init__(self, folder: str, clock: Callable[[], float] = clock_boottime) -> None:
        self._folder = folder
        self._clock = clock
        self._settings = settings.Settings({})
        self._now = self._seconds = 0.0  # when a look is, and how long after the last one
        self._totals: dict[str, CardTotals] = {}
        self._locks: Mapping[str, Lock] = {}
        self._script: Mapping[str, str] = {}

    def open(self) -> None:
        """Read the node's settings; raise RuntimeError where the folder is no simulated node."""
        try:
            self._settings = settings_file.read_settings(f"{self._folder}/gpulock.conf")
        except Refusal as fault:
            raise RuntimeError(f"{fault.why}; {fault.do}") from fault
        if not self._settings.simulation:
            raise RuntimeError(f"{self._folder} is no simulated node; make one: gpulock simulate")

    def collect(self, processes: bool) -> Frame:
        """Look once; raise RuntimeError where the node has no driver any more."""
        now = self._clock()
        self._now, self._seconds = now, now - self._now if self._now else 0.0
        frame = Frame(now)
        here = self._settings
        try:
            inventory = kv.decode_pairs(atomic.read_text(f"{self._folder}/nvml"), INVENTORY_LINE)
            cards = device_list.read_devices(here.driver_root, here.sys_root)
            version = atomic.read_text(f"{here.driver_root}/version").split("\n", 1)[0]
            store = LockStore(here.lock_dir)
            self._locks = store.read_all_locks()
        except (Refusal, OSError, kv.MalformedError) as fault:
            raise RuntimeError(f"the simulated driver is gone: {fault}") from fault
        is_release = (word for word in version.split() if word[0].isdigit() and "." in word)
        frame.driver = next(is_release, "")
        try:
            self._script = kv.decode_pairs(atomic.read_text(f"{self._folder}/telemetry"))
        except (OSError, kv.MalformedError):
            self._script = {}
        for card in cards:
            if card.index >= 0 and not card.fault:
                frame.devices += self._records(card, inventory, processes)
        return frame

    def close(self) -> None:
        """Let go of nothing: no file stays open."""

    def _records(
        self, card: Device, inventory: dict[str, str], processes: bool
    ) -> list[DeviceTelemetry]:
        """Return what there is to say of a card and of its instances."""
        board = device_record(card, card)
        board.uuid = card.uuid or inventory.get(f"gpu.{card.bus}.uuid", "")
        board.memory_total = (
            kv.int_or_zero(inventory.get(f"gpu.{card.bus}.memory_mib", "")) * MIB or None
        )
        board.mig = inventory.get(f"gpu.{card.bus}.mig") == "1"
        load, parts = 0.0, mig_instances(card, inventory) if board.mig else []
        records = [board, *(device_record(card, part) for part in parts)]
        if board.mig:
            for number, (part, record) in enumerate(zip(parts, records[1:])):
                work = self._work(part.id)
                fill_memory(record, work, processes)
                used = self._load(work, card.index + number)
                load += used / len(parts)
                if card.model == HOPPER:
                    self._fill_use(record, used)
            board.memory_used = sum(record.memory_used or 0 for record in records[1:])
        else:
            work = self._card_work(card)
            fill_memory(board, work, processes)
            load = self._load(work, card.index)
            self._fill_use(board, load)
            board.memory_utilization = round(load / 2, 2)
            counts = nvlink_counts(inventory).items()
            links = {there: count for (here, there), count in counts if here == card.bus}
            board.links = links or None
            if inventory.get(f"gpu.{card.bus}.nvswitch") == "1":
                board.links = {"switch": SWITCH_LINKS}
        totals = self._totals.setdefault(card.bus, CardTotals())
        totals.elapsed += self._seconds
        totals.worked += load * self._seconds
        fill_board(board, totals, load)
        return records

    def _card_work(self, card: Device) -> Work:
        """Return who works on a card: the holder of its lock, or of each place on its part."""
        places = [name for name in sorted(self._locks) if name.startswith(card.bus + SHARE)]
        whole: Work = {}
        for name in places or [card.bus]:
            owner = self._locks[name].owner if places else None
            parts = (owner.places if owner else 0) or max(1, len(places))
            for pid in self._work(name):
                whole[pid] = whole.get(pid, 0.0) + 1 / parts
        return whole

    def _work(self, lock_id: str) -> Work:
        """Return who works on a device."""
        for entry in self._script.get("foreign", "").split(","):
            name, _, pid = entry.rpartition(":")
            if name == lock_id:
                return {kv.int_or_zero(pid): 1.0}
        lock = self._locks.get(lock_id)
        owner = lock.owner if lock is not None else None
        idle = lock_id in self._script.get("idle", "").split(",")
        return {owner.pid: 1.0} if owner and owner.scheduler in AT_WORK and not idle else {}

    def _load(self, work: Work, number: int) -> float:
        """Return how busy a device is now, each at another point of its wave."""
        wave = math.sin(2 * math.pi * self._now / PERIOD + number)
        return sum(work.values()) * (0.6 + 0.35 * wave)

    def _fill_use(self, record: DeviceTelemetry, load: float) -> None:
        """Say how busy a device was since the last look."""
        record.observed = min(self._seconds, OBSERVED)
        record.busy = record.observed * load
        record.utilization = round(load, 2)
        if record.name == HOPPER:
            record.gpm = dict.fromkeys(GPM, round(load / 2, 4))


def device_record(card: Device, device: Device) -> DeviceTelemetry:
    """Return which card this is, or which MIG instance of it."""
    record = DeviceTelemetry(card.bus, device.uuid, card.index, name=card.model)
    record.minor = card.minor if card.minor >= 0 else None
    record.numa = card.numa if card.numa >= 0 else None
    if device is not card:
        gi, _, ci = device.id.partition(".gi")[2].partition(".ci")
        record.profile = device.profile
        record.gi, record.ci = kv.int_or_zero(gi), kv.int_or_zero(ci)
        record.memory_total = device.memory_mib * MIB or None
    return record


def fill_memory(record: DeviceTelemetry, work: Work, processes: bool) -> None:
    """Say how much of its memory is in use, and by whom where that is asked."""
    used = {pid: int(part * MEMORY * (record.memory_total or 0)) for pid, part in work.items()}
    record.memory_used = sum(used.values())
    if processes:
        record.processes = {pid: memory for pid, memory in used.items() if pid}


def fill_board(record: DeviceTelemetry, totals: CardTotals, load: float) -> None:
    """Say what belongs to the board, under a load since the last look."""
    idle, most = WATTS
    vars(record).update(WELL)
    record.power = round(idle + (most - idle) * load, 2)
    record.power_limit = record.power_limit_enforced = most
    record.energy = round(idle * totals.elapsed + (most - idle) * totals.worked, 3)
    record.temperature = float(round(29 + 46 * load))
    record.memory_temperature = record.temperature + 6
    record.sm_clock, record.memory_clock = round(345 + 1635 * load) * 1e6, 3.2e9
    record.clock_reasons = 0 if load else 1  # gpu_idle
    record.clock_reason_seconds = {"sw_power_cap": round(totals.worked / 8, 3)}
    record.pcie_transmit = int(totals.worked * 1400) * MIB
    record.pcie_receive = int(totals.worked * 2300) * MIB
    if record.links:
        record.nvlink_transmit = record.nvlink_receive = int(totals.worked * 41000) * MIB
        record.nvlink_errors = dict.fromkeys(("crc_data", "crc_flit", "recovery", "replay"), 0)
        record.nvlink_active = sum(record.links.values())
