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
from collections.abc import Callable, Collection

from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node import devices, settings, settings_file
from gpulock.node.devices import INVENTORY_LINE as LINE
from gpulock.node.devices import nvlink_counts as links_of
from gpulock.store import atomic, kv
from gpulock.store.locks import Lock, LockStore
from gpulock_exporter.simulated.card import SimulatedState
from gpulock_exporter.simulated.scene import Scene, read_simulation_script
from gpulock_exporter.telemetry import Frame


class SimulatedSource:
    """The simulated node in `folder`; see telemetry.FrameSource."""

    def __init__(self, folder: str, clock: Callable[[], float] = clock_boottime) -> None:
        self._folder = folder
        self._clock = clock
        self._settings = settings.Settings({})
        self._sequence = 0
        self._last: float | None = None
        self._states: dict[str, SimulatedState] = {}

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
        before, self._last = now if self._last is None else self._last, now
        self._sequence += 1
        frame = Frame(sequence=self._sequence, boottime=now, wall=time.time())
        script = read_simulation_script(f"{self._folder}/telemetry")
        began = time.perf_counter()
        try:
            cards, inventory = self._cards()
            frame.driver = read_simulated_driver_version(f"{self._settings.driver_root}/version")
        except (Refusal, OSError) as fault:
            raise RuntimeError(f"the simulated driver is gone: {fault}") from fault
        try:
            locks = self._locks()
        except Refusal as fault:
            locks = {}
            frame.failures["devices"] = fault.why
        links = links_of(inventory)
        scene = Scene(before, now, processes, locks, script, inventory, links, shared)
        for card in cards:
            frame.devices += scene.records(
                card, self._states.setdefault(card.bus, SimulatedState())
            )
        frame.durations["devices"] = time.perf_counter() - began
        return frame

    def close(self) -> None:
        """Let go of nothing: no file stays open."""

    def _cards(self) -> tuple[list[devices.Device], dict[str, str]]:
        """Return the cards that NVML would count, and what only NVML tells of them."""
        here = self._settings
        inventory = read_simulated_nvml(f"{self._folder}/nvml")
        cards = devices.read_devices(here.driver_root, here.sys_root)
        return [card for card in cards if card.index >= 0 and not card.fault], inventory

    def _locks(self) -> dict[str, Lock]:
        store = LockStore(self._settings.lock_dir)
        return store.read_all_locks() if store.exists() else {}


def read_simulated_nvml(path: str) -> dict[str, str]:
    """Return what NVML would tell, of whatever boot; raise OSError where there is none."""
    try:
        return kv.decode_pairs(atomic.read_text(path), LINE)
    except kv.MalformedError as fault:
        raise OSError(f"{path}: {fault}") from fault


def read_simulated_driver_version(path: str) -> str:
    """Return the release that the driver's `version` names, empty where it does not."""
    words = atomic.read_text(path).split("\n", 1)[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "")
