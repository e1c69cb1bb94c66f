# SPDX-License-Identifier: Apache-2.0
"""The last minutes of each device's utilisation, kept and drawn for the page. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby

LENGTH = 300  # values, one a second
SHOWN = 100  # points of a sparkline
SPAN = "5 minutes"  # of a sparkline
SPARK_WIDTH, SPARK_HEIGHT = 240, 40  # of the viewBox


class UtilizationHistory:
    """One value a second and device; None where it was not observed."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float | None]] = {}

    def add(self, values: Mapping[str, float | None]) -> None:
        """Take one second; a device that is gone is forgotten with the last of its line."""
        for name in {*self._values, *values}:
            line = self._values.setdefault(name, deque(maxlen=LENGTH))
            line.append(values.get(name))
            if name not in values and not any(value is not None for value in line):
                del self._values[name]

    def of(self, name: str) -> list[float | None]:
        """Return a device's line, thinned to means of what was observed."""
        seen = self._values.get(name, ())
        values = [*[None] * (LENGTH - len(seen)), *seen]  # not seen, so not drawn
        step = LENGTH // SHOWN
        runs = (values[at : at + step] for at in range(0, LENGTH, step))
        known = ([value for value in run if value is not None] for run in runs)
        return [sum(run) / len(run) if run else None for run in known]


def render_sparkline(history: Sequence[float | None]) -> str:
    """Return the utilisation as a line over a shade; where nothing was observed both break."""
    step = SPARK_WIDTH / max(1, len(history) - 1)
    line: list[str] = []
    shade: list[str] = []
    for known, run in groupby(enumerate(history), key=lambda one: one[1] is not None):
        if not known:
            continue
        points = [
            (place * step, 1 + (SPARK_HEIGHT - 2) * (1 - (value or 0.0))) for place, value in run
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        line.append(f"M{path}" + ("h0" if len(points) == 1 else ""))
        (first, _), (last, _) = points[0], points[-1]
        shade.append(f"M{first:.1f} {SPARK_HEIGHT}L{path}L{last:.1f} {SPARK_HEIGHT}z")
    if not line:
        return ""
    return (
        f'<svg viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" preserveAspectRatio=none role=img '
        f'aria-label="utilisation of the last {SPAN}"><path class=shade d="{"".join(shade)}"/>'
        f'<path d="{"".join(line)}"/></svg>'
    )
