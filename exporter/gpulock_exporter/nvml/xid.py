# SPDX-License-Identifier: Apache-2.0
"""XID errors, by an event set that is asked at each look and never waited for.

Only the worker imports this. The driver tells of no event from before it was registered for, and
after an error an event set is in no defined state (nvml.h): it is made anew, less and less often.
A card that spoils a set when it is to be registered is left out of the next one, and tried again
by a set of its own: the others are listened to meanwhile.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable

import pynvml

from gpulock_exporter.nvml.answers import (
    ABSENT,
    LOST,
    RETRY,
    NvmlDevice,
    PollContext,
    has_nvml_function,
    nvml_error_text,
)
from gpulock_exporter.nvml.named_calls import call_nvml
from gpulock_exporter.telemetry import Xid

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before the next event set
EVENT = struct.Struct("@PQQ8x")  # nvmlEventData_t
MOST = 256  # events taken at one look
DEAF = ABSENT | LOST  # of one card, whose set stays usable


class XidEventSet:
    """The event set of all cards that can be listened to."""

    def __init__(self) -> None:
        self._set: pynvml.c_nvmlEventSet_t | None = None
        self._uuids: dict[int, str] = {}
        self._spoilers: dict[str, str] = {}  # cards that spoil a set by name, and how
        self._not_before = 0.0
        self._try_again = 0.0  # those that spoil a set
        self._pause = FIRST_PAUSE
        self._fault = ""
        self._old = False
        self._kept: list[Xid] = []  # of a set that was closed since the last look

    def poll(self, look: PollContext, cards: Iterable[tuple[NvmlDevice, str]]) -> list[Xid]:
        """Return the XIDs since the last look; `cards` are those to hear of, with their UUIDs."""
        found = [*self._kept, *self._taken(look)]
        self._kept = []
        known = list(cards) if self._set is None or self._old or self._spoilers else []
        if self._spoilers and look.now >= self._try_again:
            self._try_again = look.now + LONGEST_PAUSE
            self._old |= any(self._is_sound(c) for c, _ in known if c.name in self._spoilers)
        if self._old:
            self.close()
            self._old, self._not_before, self._fault = False, 0.0, ""
        if self._set is None and look.now >= self._not_before:
            self._make(look, known)
            found += self._taken(look)
        for name, fault in self._spoilers.items():
            look.fail("xid", name, fault)
        if self._fault:
            look.fail("xid", "", self._fault)
        return found

    def _taken(self, look: PollContext) -> list[Xid]:
        """Return the events that wait in the set."""
        found: list[Xid] = []
        try:
            while self._set is not None and len(found) < MOST:
                address, kind, data = _take_event(self._set)
                if kind & pynvml.nvmlEventTypeXidCriticalError:
                    found.append(Xid(self._uuids.get(address, ""), data))
        except pynvml.NVMLError as fault:
            if fault.value == pynvml.NVML_ERROR_TIMEOUT:
                self._pause = FIRST_PAUSE
            else:
                self._break(look, fault.value)
        return found

    def keep(self, look: PollContext) -> None:
        """Take what waits in the set, which is to be closed; the next look tells of it."""
        self._kept += self._taken(look)

    def close(self) -> None:
        """Give the event set back."""
        if self._set is not None:
            _free_event_set(self._set)
        self._set = None

    def renew(self) -> None:
        """Make the event set anew at the next look, once it is empty: a card is another one now."""
        self._old = True

    def _make(self, look: PollContext, cards: list[tuple[NvmlDevice, str]]) -> None:
        """Register all cards that can tell; one that cannot does not spoil it for the others."""
        self._spoilers, self._try_again = {}, look.now + LONGEST_PAUSE
        while not self._registered(
            look, [one for one in cards if one[0].name not in self._spoilers]
        ):
            self.close()

    def _registered(self, look: PollContext, cards: list[tuple[NvmlDevice, str]]) -> bool:
        """Make a set of these cards; return whether none of them has spoiled it."""
        self._uuids, self._fault = {}, ""
        try:
            events = self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as fault:
            self._break(look, fault.value)
            return True
        for card, uuid in cards:
            look.note.enter_card(card.index, card.name)
            try:
                if _register_xid_events(card, events):
                    self._uuids[_handle_address(card.handle)] = uuid
            except pynvml.NVMLError as fault:
                self._spoilers[card.name] = nvml_error_text(fault.value)
                return False
        look.note.leave_card()
        if not self._uuids:  # nobody to hear of
            self.close()
            self._not_before = look.now + RETRY
        return True

    def _is_sound(self, card: NvmlDevice) -> bool:
        """Return whether a card does not spoil a set any more, tried on one of its own."""
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return False
        try:
            _register_xid_events(card, events)
        except pynvml.NVMLError:
            return False
        finally:
            _free_event_set(events)
        return True

    def _break(self, look: PollContext, error: int) -> None:
        """Let go of the set; the next one is made after a pause."""
        self.close()
        if error != pynvml.NVML_ERROR_NOT_SUPPORTED:  # that says that no XID is to be heard of
            self._fault = nvml_error_text(error)
        if error in ABSENT:
            self._not_before = look.now + RETRY
            return
        self._not_before = look.now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def _take_event(events: pynvml.c_nvmlEventSet_t) -> tuple[int, int, int]:
    """Return the address of a card's handle, the type and the data of an event; raise NVMLError.

    What the first version of the call (before 450) fills in is the beginning of the second's.
    """
    version = "_v2" if has_nvml_function("nvmlEventSetWait_v2") else ""
    raw = ctypes.create_string_buffer(EVENT.size)
    call_nvml(f"nvmlEventSetWait{version}", events, raw, ctypes.c_uint(0))
    return EVENT.unpack(raw.raw)


def _register_xid_events(card: NvmlDevice, events: pynvml.c_nvmlEventSet_t) -> bool:
    """Have a card's XIDs in a set; return False where it has none to tell, or is lost.

    Any other error is raised: the set is spoiled by it (nvmlDeviceRegisterEvents in nvml.h).
    """
    try:
        kind = pynvml.nvmlEventTypeXidCriticalError
        pynvml.nvmlDeviceRegisterEvents(card.handle, kind, events)
    except pynvml.NVMLError as fault:
        if fault.value in DEAF:
            return False
        raise
    return True


def _free_event_set(events: pynvml.c_nvmlEventSet_t) -> None:
    try:
        pynvml.nvmlEventSetFree(events)
    except pynvml.NVMLError:
        pass  # the driver is gone, and the set is with it


def _handle_address(handle: pynvml.c_nvmlDevice_t) -> int:
    """Return where a handle points: the driver gives the same for the same card."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
