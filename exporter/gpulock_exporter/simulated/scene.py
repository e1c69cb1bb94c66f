# SPDX-License-Identifier: Apache-2.0
"""One look at a simulated node: its locks and its script turned into what the devices show."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpulock.node import devices
from gpulock.node.devices import SHARE, mig_instances
from gpulock.store import atomic, kv
from gpulock.store.locks import Lock
from gpulock_exporter.simulated.card import (
    MODELS,
    OTHER,
    SimulatedModel,
    SimulatedState,
    device_load,
    fill_board,
    fill_work,
    mean_device_load,
    memory_share,
)
from gpulock_exporter.telemetry import DeviceTelemetry, Process

MIB = 1 << 20
SLICES = 7  # of a card that is split
SWITCHED = {"NVIDIA H200": 18, "NVIDIA A100-SXM4-80GB": 12}  # NVLinks; older cards have 6
AT_WORK = frozenset({"sge", "slurm", "process"})  # a reserve does nothing


class SimulationScript(NamedTuple):
    """What the file `telemetry` of a node says: see `simulated`."""

    idle: frozenset[str] = frozenset()
    foreign: Mapping[str, int] = {}


class SimulatedWork(NamedTuple):
    """What a device does: load now, its mean since the last look, part of memory.

    `users` has of each process its mean and its part of the memory, by pid.
    """

    now: float = 0.0
    mean: float = 0.0
    memory: float = 0.0
    users: Mapping[int, tuple[float, float]] = {}


class Scene(NamedTuple):
    """A look at the moment `now`, `before` being that of the last one.

    `shared` are the cards of which it is wanted how much each process worked, by bus id.
    """

    before: float
    now: float
    processes: bool
    locks: Mapping[str, Lock]
    script: SimulationScript
    inventory: dict[str, str]
    links: Mapping[tuple[str, str], int]
    shared: Collection[str] = ()

    def records(self, card: devices.Device, state: SimulatedState) -> list[DeviceTelemetry]:
        """Return what there is to say of a card and of its instances; `state` moves on."""
        model = MODELS.get(card.model, OTHER)
        record = self._card(card, model)
        parts: list[DeviceTelemetry] = []
        if record.mig:
            mean = 0.0
            for number, instance in enumerate(mig_instances(card, self.inventory)):
                work = self.work(instance.id, card.index + number)
                parts.append(self._instance(card, instance, model, work))
                mean += work.mean * mig_profile_slices(instance.profile) / SLICES
            record.memory_used = sum(part.memory_used or 0 for part in parts)
        else:
            work = self.card_work(card)
            mean = work.mean
            self._use(record, work)
            if card.bus in self.shared:
                record.process_use = {str(pid): part for pid, (part, _) in work.users.items()}
            fill_work(record, model, work.now, mean, self.now - self.before)
        state.advance(model, mean, self.now - self.before)
        fill_board(record, model, state, mean)
        return [record, *parts]

    def work(self, lock_id: str, seed: int) -> SimulatedWork:
        """Return what a device does; its pattern is that of `seed`."""
        lock = self.locks.get(lock_id)
        owner = lock.owner if lock is not None else None
        pid = self.script.foreign.get(lock_id, 0)
        since = 0.0 if pid else None
        if owner is not None and owner.scheduler in AT_WORK and lock_id not in self.script.idle:
            since, pid = owner.claimed_boottime, pid or owner.pid
        if since is None:
            return SimulatedWork()
        ages = self.before - since, self.now - since
        mean, memory = mean_device_load(seed, *ages), memory_share(seed, ages[1])
        users = {pid: (mean, memory)} if pid else {}
        return SimulatedWork(device_load(seed, ages[1]), mean, memory, users)

    def card_work(self, card: devices.Device) -> SimulatedWork:
        """Return what a card does: that of its lock, or of each place its part."""
        places = [name for name in sorted(self.locks) if name.startswith(card.bus + SHARE)]
        if not places:
            return self.work(card.bus, card.index)
        now = mean = memory = 0.0
        users: dict[int, tuple[float, float]] = {}
        for number, name in enumerate(places):
            owner, one = self.locks[name].owner, self.work(name, card.index + number)
            of = (owner.places if owner else 0) or len(places)
            now, mean, memory = now + one.now / of, mean + one.mean / of, memory + one.memory / of
            for pid, (part, used) in one.users.items():
                before = users.get(pid, (0.0, 0.0))
                users[pid] = (before[0] + part / of, before[1] + used / of)
        return SimulatedWork(now, mean, memory, users)

    def _card(self, card: devices.Device, model: SimulatedModel) -> DeviceTelemetry:
        told = self.inventory
        split = told.get(f"gpu.{card.bus}.mig") == "1"
        return DeviceTelemetry(
            bus=card.bus,
            uuid=card.uuid or told.get(f"gpu.{card.bus}.uuid", ""),
            index=card.index,
            minor=card.minor if card.minor >= 0 else None,
            name=card.model,
            mig=split if card.model in SWITCHED else None,
            persistence=True,
            numa=card.numa if card.numa >= 0 else None,
            links=self._links(card) if model.nvlink and not split else None,
            memory_total=kv.int_or_zero(told.get(f"gpu.{card.bus}.memory_mib", "")) * MIB or None,
        )

    def _instance(
        self,
        card: devices.Device,
        instance: devices.Device,
        model: SimulatedModel,
        work: SimulatedWork,
    ) -> DeviceTelemetry:
        _, _, place = instance.id.partition(".gi")
        gi, _, ci = place.partition(".ci")
        record = DeviceTelemetry(
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
        self._use(record, work)
        if model.gpm:
            fill_work(record, model, work.now, work.mean, self.now - self.before)
        return record

    def _use(self, record: DeviceTelemetry, work: SimulatedWork) -> None:
        """Say how much of its memory is in use, and by whom where that is asked."""
        record.memory_used = int(work.memory * (record.memory_total or 0))
        if self.processes and not record.mig:
            total = record.memory_total or 0
            record.processes = [
                Process(pid, int(of * total)) for pid, (_, of) in work.users.items()
            ]

    def _links(self, card: devices.Device) -> dict[str, int]:
        if self.inventory.get(f"gpu.{card.bus}.nvswitch") == "1":
            return {"switch": SWITCHED.get(card.model, 6)}
        return {there: count for (here, there), count in self.links.items() if here == card.bus}


def mig_profile_slices(profile: str) -> int:
    """Return how many sevenths of a card `3g.40gb` is."""
    return kv.int_or_zero(profile.partition("g.")[0]) or 1


def read_simulation_script(path: str) -> SimulationScript:
    """Return what the file says; nothing where there is none, or it is not to be understood."""
    try:
        pairs = kv.decode_pairs(atomic.read_text(path))
    except (OSError, kv.MalformedError):
        return SimulationScript()
    foreign = [entry.rpartition(":") for entry in pairs.get("foreign", "").split(",")]
    return SimulationScript(
        frozenset(pairs.get("idle", "").split(",")),
        {lock_id: kv.int_or_zero(pid) for lock_id, _, pid in foreign if kv.int_or_zero(pid)},
    )
