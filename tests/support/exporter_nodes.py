# SPDX-License-Identifier: Apache-2.0
"""A node as the exporter sees it: frames, facts and ticks, on a clock that a test moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpulock_exporter.files.sample_file import sample_text
from gpulock_exporter.frame import DeviceTelemetry, Frame, decode_frame, encode_frame
from gpulock_exporter.state.claim_accounting import Accounts
from gpulock_exporter.state.collector_state import CollectorState, ExporterMemory
from gpulock_exporter.state.join import take_snapshot
from gpulock_exporter.state.local_state import LocalState
from gpulock_exporter.state.snapshot import ExporterHealth, Moment, NodeSnapshot

from gpulock.alloc.process_scan import ProcessScan
from gpulock.node import devices
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store.locks import Lock
from gpulock.store.quarantine import note_reason
from gpulock.store.verdicts import Verdict
from tests.support.trees import BOOT, bus, record

EPOCH = 1_700_000_000.0  # wall clock at boottime 0
GIB = 1 << 30


def uuid(number: int) -> str:
    """Return the UUID of a card."""
    return f"GPU-{number:08d}-0000-0000-0000-000000000000"


def card(number: int = 0, **changes: Any) -> DeviceTelemetry:
    """Return a card that was observed for one second, half of it at work."""
    fields: dict[str, Any] = {
        "bus": bus(number),
        "uuid": uuid(number),
        "index": number,
        "minor": number,
        "name": "NVIDIA H100 80GB HBM3",
        "utilization": 0.5,
        "busy": 0.5,
        "observed": 1.0,
        "memory_used": 10 * GIB,
        "memory_total": 80 * GIB,
        **changes,
    }
    return DeviceTelemetry(**fields)


def full_card(number: int = 0, **changes: Any) -> DeviceTelemetry:
    """Return a card that tells everything there is."""
    fields: dict[str, Any] = {
        "mig": False,
        "persistence": True,
        "numa": number // 4,
        "memory_utilization": 0.25,
        "power": 412.5,
        "energy": 12_345.678,
        "temperature": 61.0,
        "memory_temperature": 72.0,
        "power_limit": 700.0,
        "power_limit_enforced": 650.0,
        "fan": 0.4,
        "answer": 0.003,
        "pcie_generation": 4,
        "pcie_generation_max": 5,
        "pcie_width": 8,
        "pcie_width_max": 16,
        "pcie_replays": 3,
        "nvlink_errors": {"crc_flit": 2, "replay": 0},
        "nvlink_active": 17,
        "fabric": 3,
        "sm_clock": 1.98e9,
        "memory_clock": 2.619e9,
        "clock_reasons": 0x4,
        "clock_reason_seconds": {"sw_power_cap": 3.5, "hw_thermal_slowdown": 0.0},
        "ecc": {"corrected.dram": 3, "uncorrected.sram": 0},
        "remapped": {"correctable": 1, "uncorrectable": 0},
        "remap_pending": False,
        "remap_failure": True,
        "recovery_action": 1,
        "pcie_transmit": 10_000,
        "pcie_receive": 20_000,
        "nvlink_transmit": 30_000,
        "nvlink_receive": 40_000,
        "gpm": {"sm_active": 0.5, "sm_occupancy": 0.25, "tensor_active": 0.125, "dram_active": 0.1},
        **changes,
    }
    return card(number, **fields)


def instance(number: int, gi: int, **changes: Any) -> DeviceTelemetry:
    """Return a MIG instance of a card; without GPM nobody knows whether it works."""
    fields: dict[str, Any] = {
        "bus": bus(number),
        "uuid": f"MIG-{number:04d}-{gi:04d}",
        "index": number,
        "minor": number,
        "gi": gi,
        "ci": 0,
        "profile": "1g.10gb",
        "memory_used": GIB,
        "memory_total": 10 * GIB,
        **changes,
    }
    return DeviceTelemetry(**fields)


def listed(number: int = 0, part: str = "") -> devices.Device:
    """Return a card as the driver's own list has it."""
    found = devices.Device(f"{bus(number)}.{part}" if part else bus(number), number)
    found.minor = number
    return found


def lock(number: int = 0, token: str = "feedfacefeedface", part: str = "", **changes: Any) -> Lock:
    """Return a lock as it was read."""
    name = f"{bus(number)}.{part}" if part else bus(number)
    fields: dict[str, Any] = {"claimed_boottime": 900.0, "claimed_at": EPOCH + 900, **changes}
    return Lock(name, record(token=token, devices=(name,), **fields), "")


def facts(*locks: Lock, verdicts: dict[str, Verdict] | None = None, **more: Any) -> LocalState:
    """Return what gpulock's files say."""
    found = LocalState()
    found.locks, found.verdicts = {one.id: one for one in locks}, verdicts
    found.quarantined, found.quarantine_notes = {}, {}
    for name, value in more.items():
        setattr(found, name, value)
    return found


class Node:
    """A book and a clock: each tick is a second.

    Of `limits`, `oldest` is the age of a value in seconds, `gpus` how many there must be; others
    are settings by their names.
    """

    def __init__(
        self, memory: ExporterMemory | None = None, proc: str = "/nonexistent", **limits: Any
    ) -> None:
        self.now = 1000.0
        self.facts = facts()
        self.over: dict[str, Accounts] = {}
        settings = Settings({})
        settings.allowed_processes = ("Xorg",)
        for name, value in limits.items():
            setattr(
                settings,
                {"oldest": "max_sample_age", "gpus": "expected_gpus"}.get(name, name),
                value,
            )
        self.book = CollectorState(
            BOOT, settings, lambda: ProcessScan(Proc(proc)), memory or ExporterMemory()
        )

    @property
    def moment(self) -> Moment:
        """Return this moment."""
        return Moment(self.now, EPOCH + self.now)

    def frame(self, *seen: DeviceTelemetry, **changes: Any) -> Frame:
        """Return a frame of this moment."""
        fields: dict[str, Any] = {"driver": "580.1", **changes}
        frame = Frame(self.now, devices=list(seen), **fields)
        return decode_frame(encode_frame(frame))  # as it comes from a worker

    def put_out(self, notes: dict[str, dict[str, str]] | None) -> None:
        """Let there be these notes of devices that are out of service, by lock id."""
        self.facts.quarantine_notes = notes
        reasons = {name: note_reason(one) for name, one in (notes or {}).items()}
        self.facts.quarantined = None if notes is None else reasons

    def had_xid(self, number: int, xid: int) -> None:
        """Let gpulockd have read an XID of a card in the kernel's log."""
        errors = self.facts.cards.xids
        times, _ = errors.get((bus(number), xid), (0, 0.0))
        errors[bus(number), xid] = times + 1, self.now

    def take(self, *frames: Frame, **known: Any) -> dict[str, Accounts]:
        """Let the book take frames at this moment, and what else is `known`."""
        looks = self.book.classify_frames(frames, self.facts, self.moment)
        return self.book.tick(looks, self.facts, self.moment, **known)

    def tick(self, *seen: DeviceTelemetry, seconds: float = 1.0) -> dict[str, Accounts]:
        """Let a second pass, then look at devices; return the claims that are over."""
        self.now += seconds
        over = self.take(self.frame(*seen))
        self.over |= over
        return over

    def silence(self, seconds: float = 1.0) -> dict[str, Accounts]:
        """Let time pass without an answer of the driver."""
        self.now += seconds
        over = self.take()
        self.over |= over
        return over

    def snapshot(
        self, found: Sequence[devices.Device] | None = None, health: ExporterHealth | None = None
    ) -> NodeSnapshot:
        """Return what is to be told now."""
        listed_now = listed_as_nvml(self.book.devices) if found is None else found
        self.book.memory.totals.number_cards({one.bus: one.index for one in listed_now})
        parts = self.book.collectors(self.facts, self.book.is_fresh(self.moment))
        told = replace(health or ExporterHealth("0.1"), collectors=parts)
        return take_snapshot(self.book, listed_now, self.facts, self.moment, told)

    def text(self) -> str:
        """Return the sample of now."""
        return sample_text(self.book, self.moment)


def listed_as_nvml(looked: Mapping[str, DeviceTelemetry]) -> list[devices.Device]:
    """Return the driver's list where it has what NVML has: instances in place of their cards."""
    result: list[devices.Device] = []
    for name, seen in looked.items():
        if seen.mig and seen.gi is None:
            continue
        card = looked.get(seen.bus, seen)
        device = devices.Device(name, card.index)
        device.uuid, device.model, device.profile = seen.uuid, seen.name, seen.profile
        device.minor = card.minor if card.minor is not None else -1
        device.numa = card.numa if card.numa is not None else -1
        result.append(device)
    return sorted(result, key=lambda one: (one.index, one.id))
