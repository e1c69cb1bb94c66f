# SPDX-License-Identifier: Apache-2.0
"""How much each process worked on a card since it was asked last, by the driver's own samples.

Only the worker imports this. A process that did nothing has no sample. Time stamps are of a clock
that no document names, so only their differences are used. The first answer covers as much as the
driver's buffer holds: it says where that stands, and nothing of this moment.
"""

from __future__ import annotations

import ctypes
import struct

import pynvml

from gpulock_exporter.nvml.answers import NvmlDevice, PollContext
from gpulock_exporter.nvml.named_calls import call_nvml

CALL = "nvmlDeviceGetProcessUtilization"
SAMPLE = struct.Struct("@I4xQIIII")  # nvmlProcessUtilizationSample_t: pid, time, SM, memory, ...
GAP = 3.0  # seconds between two answers after which the next says nothing of this moment
ROOM = 1 << 12  # samples: drivers keep 100 to 4096
WHOLE = 100  # percent
MICRO = 1e6  # of a time stamp, a second
NOBODY = pynvml.NVML_ERROR_NOT_FOUND


class ProcessUse:
    """The samples of one card from look to look; times are CLOCK_BOOTTIME seconds."""

    def __init__(self) -> None:
        self._since = 0  # time stamp of the youngest sample, 0: none yet
        self._moved = 0.0  # when that changed last
        self._asked = -GAP

    def read(self, card: NvmlDevice, look: PollContext) -> dict[str, float] | None:
        """Return which part of the time since the last look each process worked, by pid.

        None where the driver does not tell, or what it tells cannot be.
        """
        if card.is_absent(look, CALL):
            return None
        late = look.now - self._asked > GAP
        if look.now - self._moved > GAP:
            self._since = 0  # whatever stood there: a time stamp from the future would stay
        self._asked = look.now
        first = not self._since
        try:
            samples = self._ask(card)
        except pynvml.NVMLError as fault:
            if fault.value != NOBODY:
                card.refused(look, "utilization", CALL, fault.value)
                return None
            return None if late else {}
        youngest = max((at for _, at, *_ in samples), default=self._since)
        self._since, self._moved = youngest, look.now if youngest != self._since else self._moved
        if first and samples:
            return None
        found: dict[str, float] = {}
        for pid, _, percent, *_ in samples:
            if percent > WHOLE or (percent and not pid):
                look.fail("utilization", card.name, f"process {pid} cannot work {percent} %")
                return None
            if percent:
                found[str(pid)] = max(found.get(str(pid), 0.0), percent / WHOLE)
        return found

    def _ask(self, card: NvmlDevice) -> list[tuple[int, ...]]:
        """Return what is younger than the last one; raise NVMLError."""
        raw, count = ctypes.create_string_buffer(SAMPLE.size * ROOM), ctypes.c_uint(ROOM)
        since = ctypes.c_ulonglong(self._since)
        call_nvml(CALL, card.handle, raw, ctypes.byref(count), since)
        return list(SAMPLE.iter_unpack(memoryview(raw)[: SAMPLE.size * min(count.value, ROOM)]))
