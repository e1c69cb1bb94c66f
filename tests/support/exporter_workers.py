# SPDX-License-Identifier: Apache-2.0
"""Supervisors of shell workers, on a clock that a test moves."""

from __future__ import annotations

from pathlib import Path

import psutil
from gpulock_exporter.telemetry import DeviceTelemetry, Frame, encode_frame
from gpulock_exporter.worker.child import WorkerTimeouts
from gpulock_exporter.worker.supervisor import Supervisor

from tests.support.clock import VirtualClock

LIMITS = WorkerTimeouts(first=30, frame=5)
GOOD = encode_frame(
    Frame(1, 2.0, 3.0, devices=[DeviceTelemetry("0000:3b:00.0", "GPU-1", 0)])
).decode()


class Nest:
    """A supervisor of shell workers."""

    def __init__(self, root: Path) -> None:
        self.clock = VirtualClock()
        self.root = root
        self.others = children()
        self.made: list[Supervisor] = []

    def supervise(self, body: str) -> Supervisor:
        """Return a supervisor whose worker is a shell script."""
        path = self.root / "worker"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        self.made.append(Supervisor([str(path)], self.clock, LIMITS, env={"GOOD": GOOD.strip()}))
        return self.made[-1]


def children() -> set[int]:
    """Return our children that are not reaped yet."""
    return {one.pid for one in psutil.Process().children()}
