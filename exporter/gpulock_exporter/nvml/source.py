# SPDX-License-Identifier: Apache-2.0
"""NVML as a source of frames.

Only the worker imports this. A look raises RuntimeError where there is no driver any more, and
nothing else: then the worker ends, and its supervisor starts another. A card that is lost is left
out, and the others are not disturbed; NVML is initialised again where it asks for that, where the
number of cards changes, and now and then while a card is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pynvml

from gpulock.deadline import clock_boottime
from gpulock_exporter.frame import Frame
from gpulock_exporter.nvml import collect
from gpulock_exporter.nvml.answers import (
    LOST,
    NAMED,
    GpuLostError,
    NvmlStaleError,
    PollContext,
    calls,
)
from gpulock_exporter.nvml.card import NvmlCard, Records

REST = 5.0  # seconds between two initialisations that could wait: each may take a second
LOST_PERIOD = 120.0  # seconds after which a lost card is looked for again
ADVICE = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the driver's libnvidia-ml.so.1",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the driver: nvidia-smi shows why",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was replaced: reload it, or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "let this user open /dev/nvidiactl and /dev/nvidia*",
}


class NvmlSource:
    """The cards of this node whose index is wanted: where frames come from."""

    def __init__(
        self,
        clock: Callable[[], float] = clock_boottime,
        sys_root: str = "/sys",
        wanted: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._wanted = wanted
        self._clock = clock
        self._sys_root = sys_root
        self._driver = ""
        self._count = 0
        self._cards: dict[int, NvmlCard] = {}
        self._missing: dict[int, str] = {}  # indexes that gave no card, and why
        self._denied = False  # this user may not open one of the cards
        self._unlisted = ""  # why the processes could not be listed when they were asked for last
        self._opened = 0.0
        self._stale = False
        self._retry_at = 0.0  # when a lost card is looked for again, 0 while none is lost

    def open(self) -> None:
        """Initialise NVML; raise RuntimeError with the driver's words where that cannot be."""
        self._open(PollContext(self._clock()))
        NAMED.note.leave_card()

    def collect(self, processes: bool) -> Frame:
        """Look once; raise RuntimeError where the driver is gone."""
        poll = PollContext(self._clock(), processes)
        frame = Frame(poll.now)
        lost = self._refresh(poll)
        by_card = {index: [card.blank_record()] for index, card in self._cards.items()}
        for index, card in self._cards.items():
            if index in lost:
                continue
            NAMED.note.enter_card(index, card.lock_id)
            asked = time.perf_counter()
            for name, collector in COLLECTORS.items():
                try:
                    collector(card, by_card[index], poll)
                except GpuLostError as fault:
                    lost[index] = str(fault)
                    break
                except NvmlStaleError as fault:
                    poll.fail(name, card.lock_id, fault)
                    self._stale = True
            by_card[index][0].answer = time.perf_counter() - asked
        NAMED.note.leave_card()
        here = [records for index, records in by_card.items() if index not in lost]
        frame.devices = [record for records in here for record in records]
        if poll.processes:
            self._unlisted = poll.failures.get("processes", "")
        elif self._unlisted:  # told until they are asked for again, not just once
            poll.fail("processes", "", self._unlisted)
        names = {index: card.lock_id for index, card in self._cards.items()}
        for index, why in sorted(lost.items()):
            poll.fail("devices", names.get(index, f"card {index}"), why)
        frame.driver, frame.failures = self._driver, poll.failures
        frame.lost = {names[index]: why for index, why in lost.items() if index in names}
        frame.complete = self._count > 0 and not self._denied
        return frame

    def close(self) -> None:
        """Let go of the driver."""
        NAMED.note.leave_card()
        for card in self._cards.values():
            card.close()
        self._cards = {}
        try:
            calls.nvmlShutdown()
        except pynvml.NVMLError:
            pass  # it was not initialised, or is gone

    # --- inner --------------------------------------------------------------------------------

    def _open(self, poll: PollContext) -> None:
        self._opened, self._stale = poll.now, False
        try:
            calls.nvmlInit()
            self._count = calls.nvmlDeviceGetCount()
        except pynvml.NVMLError as fault:
            self.close()
            advice = ADVICE.get(fault.value, "look at nvidia-smi and the kernel's log")
            raise RuntimeError(f"NVML: {fault}; {advice}") from fault
        try:
            self._driver = calls.nvmlSystemGetDriverVersion()
        except (pynvml.NVMLError, ValueError) as fault:
            self._driver = ""
            poll.fail("devices", "", fault)
        self._missing, self._denied = {}, False
        for index in range(self._count):
            if self._wanted(index):
                NAMED.note.enter_card(index, "")
                self._open_card(index, poll)

    def _open_card(self, index: int, poll: PollContext) -> None:
        """Find the card of an index, or why it is missing."""
        try:
            self._cards[index] = NvmlCard(index, poll, self._sys_root, self._driver)
        except pynvml.NVMLError as fault:
            self._missing[index] = str(fault)
            self._denied |= fault.value == pynvml.NVML_ERROR_NO_PERMISSION
        except (GpuLostError, NvmlStaleError, ValueError) as fault:
            self._missing[index] = str(fault)

    def _reopen(self, poll: PollContext) -> None:
        """Initialise NVML again; what is known of the samples of a card stays with it."""
        samples = {card.uuid: card.samples for card in self._cards.values() if card.uuid}
        self.close()
        self._open(poll)
        for card in self._cards.values():
            card.samples = samples.get(card.uuid, card.samples)

    def _refresh(self, poll: PollContext) -> dict[int, str]:
        """See that the cards are those there are; return the lost ones by index, and why."""
        rested = poll.now - self._opened >= REST
        try:
            changed = calls.nvmlDeviceGetCount() != self._count
        except pynvml.NVMLError:
            self._reopen(poll)
            rested = changed = False
        if rested and (self._stale or changed):
            self._reopen(poll)
        lost = dict(self._missing)
        for card in list(self._cards.values()):
            NAMED.note.enter_card(card.index, card.lock_id)
            self._check(card, poll, lost)
        if not lost:
            self._retry_at = 0.0
        elif not self._retry_at:
            self._retry_at = poll.now + LOST_PERIOD
        elif poll.now >= self._retry_at:
            self._stale, self._retry_at = True, poll.now + LOST_PERIOD
        return lost

    def _check(self, card: NvmlCard, poll: PollContext, lost: dict[int, str]) -> None:
        """See that a handle still stands for the card that it stood for."""
        try:
            if not card.uuid or calls.nvmlDeviceGetUUID(card.handle) == card.uuid:
                return
        except pynvml.NVMLError as fault:
            lost[card.index] = str(fault)
            self._stale |= fault.value not in LOST
            return
        except ValueError as fault:
            lost[card.index] = str(fault)
            return
        card.close()
        self._open_card(card.index, poll)
        if card.index in self._missing:  # looked at again the next time
            lost[card.index] = self._missing.pop(card.index)


Collect = Callable[[NvmlCard, Records, PollContext], None]
COLLECTORS: dict[str, Collect] = {
    "mig": NvmlCard.begin,
    "utilization": collect.collect_utilization,
    "memory": collect.collect_memory,
    "power": collect.collect_power,
    "gpm": collect.collect_gpm,
    "counters": collect.collect_slow_counters,
    "processes": collect.collect_processes,
}
