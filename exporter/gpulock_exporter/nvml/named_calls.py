# SPDX-License-Identifier: Apache-2.0
"""NVML by its binding, each call of which is named in a note before it is made.

Only the worker imports this. `calls` has the functions of pynvml; its constants and types are
taken from pynvml itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pynvml

from gpulock_exporter.driver_calls import CallNote


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

        def call(*arguments: Any) -> Any:
            self.note.name_call(name)
            function = getattr(pynvml, name, None)
            if function is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return function(*arguments, *last)

        return call


NAMED = NamedCalls()
if TYPE_CHECKING:
    calls = pynvml
else:
    calls = NAMED


def call_nvml(name: str, *arguments: Any) -> None:
    """Call a function of the library itself; raise NVMLError, also where it has no such one."""
    NAMED.note.name_call(name)
    function = getattr(pynvml.nvmlLib, name, None)
    if function is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    error = function(*arguments)
    if error:
        raise pynvml.NVMLError(error)
