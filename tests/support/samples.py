# SPDX-License-Identifier: Apache-2.0
"""The exporter's sample as a test writes it."""

from __future__ import annotations

import time
from pathlib import Path

from gpulock.daemon.core.sample import SAMPLE_LINE

GIB = 1 << 30
HERE = Path("/proc/sys/kernel/random/boot_id")


class Sampled:
    """A sample of this boot in `folder`; each `write` replaces it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.lines: list[str] = []

    def device(self, name: str, *, age: float = 0, **fields: object) -> None:
        """Tell of a device, looked at `age` seconds ago."""
        told: dict[str, object] = {
            "looked": self.now - age,
            "utilization": 0.5,
            "memory_used": 12 * GIB,
            "memory_total": 32 * GIB,
            "processes": 1,
            "foreign": 0,
            "unseen": 0,
            **fields,
        }
        self.lines.append(" ".join(["device", name, *pairs(told)]))

    def claim(self, token: str, name: str, **fields: object) -> None:
        """Tell of a device's work for a claim."""
        told: dict[str, object] = {
            "busy": 50.0,
            "observed": 100.0,
            "idle": 0.0,
            "seen": self.now,
            **fields,
        }
        self.lines.append(" ".join(["token", token, name, *pairs(told)]))

    def write(self, *, age: float = 0, looked: float | None = 0, **more: str) -> None:
        """Write what was told, `age` seconds ago; the driver answered `looked` before that."""
        at = self.now - age
        head: dict[str, object] = {
            "boot_id": HERE.read_text().strip(),
            "boottime": at,
            "looked": None if looked is None else at - looked,
            **more,
        }
        self.folder.mkdir(exist_ok=True)
        text = "\n".join([SAMPLE_LINE, *pairs(head), *self.lines])
        (self.folder / "sample").write_text(text + "\n")


def pairs(told: dict[str, object]) -> list[str]:
    """Return what is known as words."""
    return [f"{key}={value}" for key, value in told.items() if value is not None]
