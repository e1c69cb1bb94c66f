# SPDX-License-Identifier: Apache-2.0
"""The last minutes of each device's utilisation, for the page. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

LENGTH = 300  # values, one a second
SHOWN = 100  # points of a sparkline


class UtilizationHistory:
    """One value a second and device; None where it was not observed."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float | None]] = {}

    def add(self, values: Mapping[str, float | None]) -> None:
        """Take one second; a device that is gone is forgotten."""
        self._values = {name: self._values.get(name) or deque(maxlen=LENGTH) for name in values}
        for name, value in values.items():
            self._values[name].append(value)

    def of(self, name: str) -> list[float | None]:
        """Return a device's line, thinned to means of what was observed."""
        seen = self._values.get(name, ())
        values = [*[None] * (LENGTH - len(seen)), *seen]  # not seen, so not drawn
        step = LENGTH // SHOWN
        return [mean_of_known(values[at : at + step]) for at in range(0, LENGTH, step)]


def mean_of_known(values: list[float | None]) -> float | None:
    """Return the mean of what is known, None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
