# SPDX-License-Identifier: Apache-2.0
"""A node of `gpulock simulate` as a source of frames: what NVML would tell of it.

The devices are those of its driver's files; the file `nvml` in the node's folder has what these do
not say, as `gpulock simulate` wrote it. One that is locked is at work, in a pattern of its own, as
long as the lock lasts; a free one is idle. The file `telemetry` in the node's folder, if there is
one, says what is otherwise; it is read at each look, and its lists have commas:

    idle=0000:06:00.0               held, and doing nothing
    foreign=0000:0a:00.0:4711       a process on a device, by its lock id
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node import devices, settings, settings_file
from gpulock.node.devices import INVENTORY_LINE, SHARE, Device, mig_instances, nvlink_counts
from gpulock.store import atomic, kv
from gpulock.store.locks import Lock, LockStore
from gpulock_exporter.telemetry import DeviceTelemetry, Frame, Process

MIB = 1 << 20
SLICES = 7  # of a card that is split
AT_WORK = frozenset({"sge", "slurm", "process"})  # a reserve does nothing
OBSERVED = 16.0  # seconds that the driver's buffer of samples covers
WARM_LAG = 25.0  # seconds
IDLE, BUSY = 0.02, 0.94  # loads below and above which the clocks have a reason
START, LOADING = 8.0, 20.0  # seconds in which a job gets going, and fills the device's memory
# how jobs work, by device: the middle of a wave, how far it swings, and its seconds
WAVES = ((0.96, 0.02, 20.0), (0.62, 0.3, 60.0), (0.5, 0.4, 54.0), (0.28, 0.12, 90.0))
WATTS = {  # idle, and at most
    "Tesla K80": (30, 149),
    "Tesla V100-SXM2-32GB": (43, 300),
    "Tesla V100-SXM3-32GB": (50, 350),
    "NVIDIA A100-SXM4-80GB": (62, 400),
    "NVIDIA H200": (77, 700),
}
OTHER_WATTS = (26, 450)
HOPPER = "NVIDIA H200"  # the one model with GPM: instances of others do not tell how busy they are
SWITCH_LINKS = 18
GPM = {"sm_active": 0.9, "sm_occupancy": 0.4, "tensor_active": 0.5, "dram_active": 0.6}

# what a device does, by pid (0: nobody tells it): load, part of memory
Work = dict[int, tuple[float, float]]


@dataclass
class CardState:
    """What a card remembers from one look to the next: how warm it is, and what it counts."""

    warmth: float = 0.0  # the load that its temperature stands for
    energy: float = 0.0  # joules
    capped: float = 0.0  # seconds
    worked: float = 0.0  # seconds under full load, by which its links count


class SimulatedSource:
    """The simulated node in `folder`: where frames come from, as from nvml.source."""

    def __init__(self, folder: str, clock: Callable[[], float] = clock_boottime) -> None:
        self._folder = folder
        self._clock = clock
        self._settings = settings.Settings({})
        self._sequence = 0
        self._now = self._seconds = 0.0  # when a look is, and how long after the last one
        self._states: dict[str, CardState] = {}
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

    def look(self, processes: bool, shared: Collection[str] = ()) -> Frame:
        """Look once; raise RuntimeError where the node has no driver any more."""
        now = self._clock()
        self._now, self._seconds = now, now - self._now if self._now else 0.0
        self._sequence += 1
        frame = Frame(sequence=self._sequence, boottime=now, wall=time.time())
        here = self._settings
        try:
            told = kv.decode_pairs(atomic.read_text(f"{self._folder}/nvml"), INVENTORY_LINE)
            cards = devices.read_devices(here.driver_root, here.sys_root)
            version = atomic.read_text(f"{here.driver_root}/version").split("\n", 1)[0]
        except (Refusal, OSError, kv.MalformedError) as fault:
            raise RuntimeError(f"the simulated driver is gone: {fault}") from fault
        is_release = (word for word in version.split() if word[0].isdigit() and "." in word)
        frame.driver = next(is_release, "")
        try:
            store = LockStore(here.lock_dir)
            self._locks = store.read_all_locks() if store.exists() else {}
        except Refusal as fault:
            self._locks = {}
            frame.failures["devices"] = fault.why
        try:
            self._script = kv.decode_pairs(atomic.read_text(f"{self._folder}/telemetry"))
        except (OSError, kv.MalformedError):
            self._script = {}
        for card in cards:
            if card.index >= 0 and not card.fault:
                frame.devices += self._records(card, told, processes, card.bus in shared)
        return frame

    def close(self) -> None:
        """Let go of nothing: no file stays open."""

    def _records(
        self, card: Device, told: dict[str, str], processes: bool, shared: bool
    ) -> list[DeviceTelemetry]:
        """Return what there is to say of a card and of its instances."""
        record = card_record(card, told)
        parts: list[DeviceTelemetry] = []
        if record.mig:
            load = 0.0
            for number, instance in enumerate(mig_instances(card, told)):
                work = self._work(instance.id, card.index + number)
                parts.append(instance_record(card, instance))
                fill_memory(parts[-1], work, processes)
                if card.model == HOPPER:
                    fill_work(parts[-1], load_of(work), self._seconds)
                size = kv.int_or_zero(instance.profile.partition("g.")[0]) or 1  # 3g.40gb: three
                load += load_of(work) * size / SLICES
            record.memory_used = sum(part.memory_used or 0 for part in parts)
        else:
            work = self._card_work(card)
            load = load_of(work)
            fill_memory(record, work, processes)
            fill_work(record, load, self._seconds)
            if shared:
                record.process_use = {str(pid): mean for pid, (mean, _) in work.items() if pid}
        fill_board(record, self._states.setdefault(card.bus, CardState()), load, self._seconds)
        return [record, *parts]

    def _card_work(self, card: Device) -> Work:
        """Return what a card does: that of its lock, or of each place its part."""
        places = [name for name in sorted(self._locks) if name.startswith(card.bus + SHARE)]
        whole: Work = {}
        for number, name in enumerate(places or [card.bus]):
            owner = self._locks[name].owner if places else None
            parts = (owner.places if owner else 0) or max(1, len(places))
            for pid, (load, memory) in self._work(name, card.index + number).items():
                before = whole.get(pid, (0.0, 0.0))
                whole[pid] = (before[0] + load / parts, before[1] + memory / parts)
        return whole

    def _work(self, lock_id: str, seed: int) -> Work:
        """Return what a device does; its pattern is that of `seed`."""
        foreign = dict(
            entry.rpartition(":")[::2] for entry in self._script.get("foreign", "").split(",")
        )
        pid = kv.int_or_zero(foreign.get(lock_id, ""))
        since = 0.0 if pid else None
        lock = self._locks.get(lock_id)
        owner = lock.owner if lock is not None else None
        idle = lock_id in self._script.get("idle", "").split(",")
        if owner is not None and owner.scheduler in AT_WORK and not idle:
            since, pid = owner.claimed_boottime, pid or owner.pid
        if since is None:
            return {}
        seconds = max(0.0, self._now - since)
        middle, swing, period = WAVES[seed % len(WAVES)]
        load = middle + swing * math.sin(2 * math.pi * seconds / period)
        memory = (0.4 + 0.07 * (seed % 8)) * min(1.0, seconds / LOADING)
        return {pid: (load * min(1.0, seconds / START), memory)}


def load_of(work: Work) -> float:
    """Return the load of a device."""
    return sum(load for load, _ in work.values())


def card_record(card: Device, told: dict[str, str]) -> DeviceTelemetry:
    """Return which card this is; `told` is what NVML tells of the node."""
    counts = nvlink_counts(told).items()
    links = {there: count for (here, there), count in counts if here == card.bus}
    if told.get(f"gpu.{card.bus}.nvswitch") == "1":
        links = {"switch": SWITCH_LINKS}
    split = told.get(f"gpu.{card.bus}.mig") == "1"
    return DeviceTelemetry(
        bus=card.bus,
        uuid=card.uuid or told.get(f"gpu.{card.bus}.uuid", ""),
        index=card.index,
        minor=card.minor if card.minor >= 0 else None,
        name=card.model,
        mig=split,
        persistence=True,
        numa=card.numa if card.numa >= 0 else None,
        links=None if split else links or None,
        memory_total=kv.int_or_zero(told.get(f"gpu.{card.bus}.memory_mib", "")) * MIB or None,
    )


def instance_record(card: Device, instance: Device) -> DeviceTelemetry:
    """Return which MIG instance of a card this is."""
    gi, _, ci = instance.id.partition(".gi")[2].partition(".ci")
    return DeviceTelemetry(
        bus=card.bus,
        uuid=instance.uuid,
        index=card.index,
        minor=card.minor if card.minor >= 0 else None,
        name=card.model,
        parent=card.bus,
        gi=kv.int_or_zero(gi),
        ci=kv.int_or_zero(ci),
        profile=instance.profile,
        numa=card.numa if card.numa >= 0 else None,
        memory_total=instance.memory_mib * MIB or None,
    )


def fill_memory(record: DeviceTelemetry, work: Work, processes: bool) -> None:
    """Say how much of its memory is in use, and by whom where that is asked."""
    total = record.memory_total or 0
    record.memory_used = int(sum(part for _, part in work.values()) * total)
    if processes:
        listed = [(pid, int(part * total)) for pid, (_, part) in work.items() if pid]
        record.processes = [Process(pid, memory) for pid, memory in listed]


def fill_work(record: DeviceTelemetry, load: float, seconds: float) -> None:
    """Say how busy a device was since the last look."""
    record.observed = min(seconds, OBSERVED)
    record.busy = record.observed * load
    record.utilization = round(load, 2)
    if record.name == HOPPER:
        record.gpm = {name: round(share * load, 4) for name, share in GPM.items()}
    if not record.parent:
        record.memory_utilization = round(0.5 * load, 2)


def fill_board(record: DeviceTelemetry, state: CardState, load: float, seconds: float) -> None:
    """Say what belongs to the board, under a load since the last look."""
    idle, most = WATTS.get(record.name, OTHER_WATTS)
    record.power = round(idle + (most - idle) * load, 2)
    state.warmth += (load - state.warmth) * (1 - math.exp(-seconds / WARM_LAG))
    state.energy += record.power * seconds
    state.capped += seconds if load > BUSY else 0.0
    state.worked += load * seconds
    record.power_limit = record.power_limit_enforced = most
    record.energy = round(state.energy, 3)
    record.temperature = float(round(29 + 46 * state.warmth))
    record.memory_temperature = record.temperature + 6
    record.sm_clock, record.memory_clock = round(345 + 1635 * min(1.0, 3 * load)) * 1e6, 3.2e9
    record.clock_reasons = ["gpu_idle"] if load < IDLE else ["sw_power_cap"] * (load > BUSY)
    record.clock_reason_seconds = {"sw_power_cap": round(state.capped, 3)}
    record.answer = 0.004
    record.pcie_generation = record.pcie_generation_max = 4
    record.pcie_width = record.pcie_width_max = 16
    record.pcie_replays = 0
    record.pcie_transmit = int(state.worked * 1400) * MIB
    record.pcie_receive = int(state.worked * 2300) * MIB
    record.ecc = {"corrected.dram": 0, "uncorrected.dram": 0}
    record.remapped = {"correctable": 0, "uncorrectable": 0}
    record.remap_pending = record.remap_failure = False
    record.recovery_action = 0
    if record.links:
        record.nvlink_transmit = record.nvlink_receive = int(state.worked * 41000) * MIB
        record.nvlink_errors = dict.fromkeys(("crc_data", "crc_flit", "recovery", "replay"), 0)
        record.nvlink_active = sum(record.links.values())
