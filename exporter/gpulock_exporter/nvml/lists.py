# SPDX-License-Identifier: Apache-2.0
"""The calls that fill a list, without a new one at each look.

Only the worker imports this. pynvml makes a structure for each entry, of which every attribute is
a call of Python's, and it asks how many samples there are before it reads them: at one look a
second that was a third of what the worker costs. The layouts are those of nvml.h, which the driver
cannot change.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pynvml

NARROW = 1  # NVML_VALUE_TYPE_UNSIGNED_INT, of nvmlValueType_t
WORDS = ("d", "I4x", "L", "Q", "q", "i4x", "H6x")  # members of nvmlValue_t, by nvmlValueType_t
VALUES = tuple(struct.Struct(f"@{word}") for word in WORDS)
SAMPLES = tuple(struct.Struct(f"@Q{word}") for word in WORDS)  # nvmlSample_t
FIELD = struct.Struct("@IIqqII8s")  # nvmlFieldValue_t
ASKED = struct.Struct("@II")  # its first two members: number and scope
LISTS_KEPT = 64  # of fields that were asked for together: those that a card lacks are left out

FieldValue = tuple[int, int, bytes]  # error, nvmlValueType_t, the value as it lies in memory


class FieldList:
    """Field values that are asked for by one call, as (number, scope) of nvml.h."""

    def __init__(self, fields: Sequence[tuple[int, int]]) -> None:
        blank = bytearray(FIELD.size * len(fields))
        for place, pair in enumerate(fields):
            ASKED.pack_into(blank, place * FIELD.size, *pair)
        self._blank = bytes(blank)
        self._raw = blank
        self._argument = (ctypes.c_char * len(blank)).from_buffer(blank)
        self._count = ctypes.c_int(len(fields))

    def read(self, handle: pynvml.c_nvmlDevice_t) -> list[FieldValue]:
        """Ask; raise NVMLError."""
        self._raw[:] = self._blank  # nothing of another card is left, whatever the driver fills in
        call_nvml("nvmlDeviceGetFieldValues", handle, self._count, self._argument)
        return [entry[5:3:-1] + entry[6:] for entry in FIELD.iter_unpack(self._raw)]


class SampleList:
    """The driver's buffer of samples of one device."""

    def __init__(self) -> None:
        self._raw = bytearray()
        self._room = 0

    def read(self, handle: pynvml.c_nvmlDevice_t, kind: int, since: int) -> list[tuple[int, float]]:
        """Return what is younger than `since`, 0 for all: time stamp, value; raise NVMLError.

        How many there may be is asked for with all of them, and where there is no more room.
        """
        if not since or not self._room:
            self._make_room(handle, kind)
            return self._read(handle, kind, since)
        found, before = self._read(handle, kind, since), self._room
        if len(found) == before:
            self._make_room(handle, kind)
            if self._room > before:
                return self._read(handle, kind, since)
        return found

    def _make_room(self, handle: pynvml.c_nvmlDevice_t, kind: int) -> None:
        count, value_type = ctypes.c_uint(0), ctypes.c_uint(0)
        where = (ctypes.byref(value_type), ctypes.byref(count), None)
        call_nvml(
            "nvmlDeviceGetSamples", handle, ctypes.c_uint(kind), ctypes.c_ulonglong(0), *where
        )
        if not count.value:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        self._room = count.value
        self._raw = bytearray(self._room * SAMPLES[NARROW].size)

    def _read(
        self, handle: pynvml.c_nvmlDevice_t, kind: int, since: int
    ) -> list[tuple[int, float]]:
        count, value_type = ctypes.c_uint(self._room), ctypes.c_uint(0)
        buffer = (ctypes.c_char * len(self._raw)).from_buffer(self._raw)
        where = (ctypes.byref(value_type), ctypes.byref(count), buffer)
        call_nvml(
            "nvmlDeviceGetSamples", handle, ctypes.c_uint(kind), ctypes.c_ulonglong(since), *where
        )
        number = value_type.value if value_type.value < len(SAMPLES) else NARROW
        layout = SAMPLES[number]
        size = layout.size * min(count.value, self._room)
        return list(layout.iter_unpack(memoryview(self._raw)[:size]))


@lru_cache(LISTS_KEPT)
def nvml_field_list(fields: tuple[tuple[int, int], ...]) -> FieldList:
    """Return the list that asks for these fields; it is kept, and used by all cards in turn."""
    return FieldList(fields)


def call_nvml(name: str, *arguments: Any) -> None:
    """Call NVML; raise NVMLError, also where this driver has no such function."""
    try:
        function = getattr(pynvml.nvmlLib, name)
    except AttributeError:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND) from None
    error = function(*arguments)
    if error:
        raise pynvml.NVMLError(error)
