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

import time
from collections.abc import Callable, Collection, Mapping

from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node import devices, settings, settings_file
from gpulock.node.devices import INVENTORY_LINE, SHARE, Device, mig_instances, nvlink_counts
from gpulock.store import atomic, kv
from gpulock.store.locks import Lock, LockStore
from gpulock_exporter.simulated.card import (
    AMPERE,
    HOPPER,
    MIB,
    MODELS,
    OTHER,
    SimulatedModel,
    SimulatedState,
    fill_board,
    fill_work,
    mean_device_load,
    memory_share,
)
from gpulock_exporter.telemetry import DeviceTelemetry, Frame, Process

SLICES = 7  # of a card that is split
AT_WORK = frozenset({"sge", "slurm", "process"})  # a reserve does nothing


# what a device does, by pid (0: nobody tells it): mean load since the last look, part of memory
Work = dict[int, tuple[float, float]]


class SimulatedSource:
    """The simulated node in `folder`: where frames come from, as from nvml.source."""

    def __init__(self, folder: str, clock: Callable[[], float] = clock_boottime) -> None:
        self._folder = folder
        self._clock = clock
        self._settings = settings.Settings({})
        self._sequence = 0
        self._now = self._before = 0.0
        self._states: dict[str, SimulatedState] = {}
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
        self._before, self._now = self._now or now, now
        self._sequence += 1
        frame = Frame(sequence=self._sequence, boottime=now, wall=time.time())
        began = time.perf_counter()
        here = self._settings
        try:
            told = kv.decode_pairs(atomic.read_text(f"{self._folder}/nvml"), INVENTORY_LINE)
            cards = devices.read_devices(here.driver_root, here.sys_root)
            frame.driver = read_simulated_driver_version(f"{here.driver_root}/version")
        except (Refusal, OSError, kv.MalformedError) as fault:
            raise RuntimeError(f"the simulated driver is gone: {fault}") from fault
        try:
            store = LockStore(here.lock_dir)
            self._locks = store.read_all_locks() if store.exists() else {}
        except Refusal as fault:
            self._locks = {}
            frame.failures["devices"] = fault.why
        self._script = read_simulation_script(f"{self._folder}/telemetry")
        for card in cards:
            if card.index >= 0 and not card.fault:
                frame.devices += self._records(card, told, processes, card.bus in shared)
        frame.durations["devices"] = time.perf_counter() - began
        return frame

    def close(self) -> None:
        """Let go of nothing: no file stays open."""

    def _records(
        self, card: Device, told: dict[str, str], processes: bool, shared: bool
    ) -> list[DeviceTelemetry]:
        """Return what there is to say of a card and of its instances."""
        model, seconds = MODELS.get(card.model, OTHER), self._now - self._before
        record = card_record(card, model, told)
        parts: list[DeviceTelemetry] = []
        if record.mig:
            load = 0.0
            for number, instance in enumerate(mig_instances(card, told)):
                work = self._work(instance.id, card.index + number)
                parts.append(instance_record(card, instance))
                fill_memory(parts[-1], work, processes)
                if model.capability >= HOPPER:
                    fill_work(parts[-1], model, load_of(work), seconds)
                load += load_of(work) * mig_profile_slices(instance.profile) / SLICES
            record.memory_used = sum(part.memory_used or 0 for part in parts)
        else:
            work = self._card_work(card)
            load = load_of(work)
            fill_memory(record, work, processes)
            fill_work(record, model, load, seconds)
            if shared:
                record.process_use = {str(pid): mean for pid, (mean, _) in work.items() if pid}
        state = self._states.setdefault(card.bus, SimulatedState())
        state.advance(model, load, seconds)
        fill_board(record, model, state, load)
        return [record, *parts]

    def _card_work(self, card: Device) -> Work:
        """Return what a card does: that of its lock, or of each place its part."""
        places = [name for name in sorted(self._locks) if name.startswith(card.bus + SHARE)]
        whole: Work = {}
        for number, name in enumerate(places or [card.bus]):
            owner = self._locks[name].owner if places else None
            parts = (owner.places if owner else 0) or max(1, len(places))
            for pid, (mean, memory) in self._work(name, card.index + number).items():
                before = whole.get(pid, (0.0, 0.0))
                whole[pid] = (before[0] + mean / parts, before[1] + memory / parts)
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
        mean = mean_device_load(seed, self._before - since, self._now - since)
        return {pid: (mean, memory_share(seed, self._now - since))}


def load_of(work: Work) -> float:
    """Return the load of a device since the last look."""
    return sum(mean for mean, _ in work.values())


def card_record(card: Device, model: SimulatedModel, told: dict[str, str]) -> DeviceTelemetry:
    """Return which card this is; `told` is what NVML tells of the node."""
    split = told.get(f"gpu.{card.bus}.mig") == "1"
    links: dict[str, int] | None = None
    if model.nvlinks and not split:
        counts = nvlink_counts(told).items()
        links = {there: count for (here, there), count in counts if here == card.bus}
        if told.get(f"gpu.{card.bus}.nvswitch") == "1":
            links = {"switch": model.nvlinks}
    return DeviceTelemetry(
        bus=card.bus,
        uuid=card.uuid or told.get(f"gpu.{card.bus}.uuid", ""),
        index=card.index,
        minor=card.minor if card.minor >= 0 else None,
        name=card.model,
        mig=split if model.capability >= AMPERE and model.nvlinks else None,
        persistence=True,
        numa=card.numa if card.numa >= 0 else None,
        links=links,
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


def mig_profile_slices(profile: str) -> int:
    """Return how many sevenths of a card `3g.40gb` is."""
    return kv.int_or_zero(profile.partition("g.")[0]) or 1


def read_simulation_script(path: str) -> dict[str, str]:
    """Return what the file says; nothing where there is none, or it is not to be understood."""
    try:
        return kv.decode_pairs(atomic.read_text(path))
    except (OSError, kv.MalformedError):
        return {}


def read_simulated_driver_version(path: str) -> str:
    """Return the release that the driver's `version` names, empty where it does not."""
    words = atomic.read_text(path).split("\n", 1)[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "")
