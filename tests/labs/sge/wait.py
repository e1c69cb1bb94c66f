# SPDX-License-Identifier: Apache-2.0
"""Wait for something outside this process: the one place of the lab that polls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")

PATIENCE: Final = 60.0  # seconds: far more than anything takes, on a machine that does much else


class LabError(RuntimeError):
    """The lab could not do what was asked of it; the message says why, with the daemons' words."""


def until(
    probe: Callable[[], _T | None],
    *,
    what: str,
    seconds: float = PATIENCE,
    interval: float = 0.05,
    why: Callable[[], str] = lambda: "",
) -> _T:
    """Return the first result of `probe` that is not None or False, or raise with `why()`."""
    deadline = time.monotonic() + seconds
    while True:
        result = probe()
        if result is not None and result is not False:
            return result
        if time.monotonic() > deadline:
            raise LabError(f"waited {seconds:g} s for {what}\n{why()}".rstrip())
        time.sleep(interval)
