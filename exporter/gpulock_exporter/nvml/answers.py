# SPDX-License-Identifier: Apache-2.0
"""Ask NVML, and tell apart: an answer, what a device does not have, what failed, what is over.

Only the worker imports this. `calls` has the functions of pynvml, each of which is named in a note
before it is made; its constants and types are taken from pynvml itself. NVML's errors become one of
four things here and nowhere else: None (and not asked again for a while) where the device or the
driver has no such thing; None and a failure of the collector where something went wrong;
GpuLostError where the card is gone; NvmlStaleError where NVML must be initialised again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pynvml

from gpulock_exporter.frame import NO_CARD, CallNote

_T = TypeVar("_T")

# members of nvmlValue_t, by nvmlValueType_t: layouts of nvml.h, which the driver cannot change
WORDS = ("d", "I4x", "L", "Q", "q", "i4x", "H6x")
VALUES = tuple(struct.Struct(f"@{word}") for word in WORDS)
NARROW = 1  # NVML_VALUE_TYPE_UNSIGNED_INT, of nvmlValueType_t
NOT_AVAILABLE = frozenset({(1 << 32) - 1, (1 << 64) - 1})  # NVML_VALUE_NOT_AVAILABLE
RETRY = 300.0  # seconds after which a device is asked again for what it does not support

DEPRECATED = 26  # nvml.h 12.5 and later
GPU_NOT_FOUND = 28  # nvml.h 13.0 and later
ARGUMENT_VERSION_MISMATCH = 25  # nvml.h 12.0 and later: an older driver, a shorter structure

ABSENT = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        ARGUMENT_VERSION_MISMATCH,
        DEPRECATED,
    }
)
LOST = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, GPU_NOT_FOUND})
STALE = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)


class GpuLostError(Exception):
    """Say that a card does not answer any more."""


class NvmlStaleError(Exception):
    """Say that NVML must be initialised again."""


class PollContext:
    """One look: when it is (CLOCK_BOOTTIME seconds), and what failed in each collector.

    Of one card a collector tells the first failure. `processes` says whether process lists are
    wanted.
    """

    def __init__(self, now: float, processes: bool = False) -> None:
        self.now, self.processes = now, processes
        self.failures: dict[str, str] = {}
        self._failed: set[tuple[str, str]] = set()  # collector, and which card

    def fail(self, collector: str, subject: str, words: object) -> None:
        """Note what went wrong."""
        text, card = f"{subject}: {words}" if subject else str(words), subject or str(words)
        if (collector, card) not in self._failed:
            self._failed.add((collector, card))
            known = self.failures.get(collector)
            self.failures[collector] = f"{known}; {text}" if known else text


class NvmlDevice:
    """A device as it answers: `handle` is NVML's. Remembers what it does not have."""

    index = NO_CARD  # of a card among those of NVML

    def __init__(self, handle: pynvml.c_nvmlDevice_t, lock_id: str) -> None:
        self.handle = handle
        self.lock_id = lock_id
        self._absent: dict[Hashable, float] = {}  # when to ask for it again

    def query(
        self, poll: PollContext, collector: str, *ways: Callable[[pynvml.c_nvmlDevice_t], _T]
    ) -> _T | None:
        """Return the answer of the first way that this device and driver have."""
        for way in ways:
            if self.is_absent(poll, way):
                continue
            try:
                return way(self.handle)
            except pynvml.NVMLError as fault:
                if not self.refused(poll, collector, way, fault.value):
                    return None
            except ValueError as fault:  # bytes that are no text
                poll.fail(collector, self.lock_id, fault)
                return None
        return None

    def is_absent(self, poll: PollContext, what: Hashable) -> bool:
        """Return whether the device is known not to have something."""
        return self._absent.get(what, 0.0) > poll.now

    def refused(self, poll: PollContext, collector: str, what: Hashable, error: int) -> bool:
        """Return whether `error` says that the device does not have it; otherwise it is noted.

        Raise GpuLostError or NvmlStaleError where nothing more is to be had.
        """
        if error in ABSENT:
            self._absent[what] = poll.now + RETRY
            return True
        text = str(pynvml.NVMLError(error))
        if error in LOST:
            raise GpuLostError(text)
        if error in STALE:
            raise NvmlStaleError(text)
        poll.fail(collector, self.lock_id, text)
        return False

    def forget(self) -> None:
        """Ask for everything again: the device is not what it was."""
        self._absent.clear()


class NamedCalls:
    """The functions of pynvml, by name; `note` is where a call, and its card, is named."""

    def __init__(self) -> None:
        self.note = CallNote()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function, made once: what a card lacks is remembered by it."""
        call = self.bind(name)
        setattr(self, name, call)
        return call

    def bind(self, name: str, *last: Any) -> Callable[..., Any]:
        """Return a function whose last arguments are these.

        It raises NVMLError, as of a driver without it, where nvidia-ml-py is older than that call.
        """
        function, noted = getattr(pynvml, name, raise_function_not_found), name.encode()

        def call(*arguments: Any) -> Any:
            self.note.name_call(noted)
            return function(*arguments, *last)

        return call


def raise_function_not_found(*_: Any) -> NoReturn:
    """Raise NVMLError, as of a driver without a function."""
    raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


NAMED = NamedCalls()
if TYPE_CHECKING:
    calls = pynvml
else:
    calls = NAMED


def call_nvml(name: str, *arguments: Any) -> None:
    """Call a function of the library itself; raise NVMLError, also where it has no such one."""
    NAMED.note.name_call(name.encode())
    error = getattr(pynvml.nvmlLib, name, raise_function_not_found)(*arguments)
    if error:
        raise pynvml.NVMLError(error)
