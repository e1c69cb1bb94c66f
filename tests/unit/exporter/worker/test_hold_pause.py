# SPDX-License-Identifier: Apache-2.0
"""A pause comes by a signal, between any two instructions of the supervisor: it is never lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpulock_exporter.telemetry import DeviceTelemetry, Frame, encode_frame
from gpulock_exporter.worker.supervisor import Supervisor

GOOD = encode_frame(
    Frame(1, 2.0, 3.0, devices=[DeviceTelemetry("0000:3b:00.0", "GPU-1", 0)])
).decode()
PAUSE = 60.0


class Clock:
    """Time that a test moves; `interrupt` happens at the n-th look at it, as a signal would."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = 0
        self.interrupt: tuple[int, Callable[[], None]] | None = None

    def has_interrupted(self) -> bool:
        """Tell whether what was to happen has happened."""
        return self.interrupt is None

    def __call__(self) -> float:
        self.looks += 1
        if self.interrupt is not None and self.looks == self.interrupt[0]:
            act, self.interrupt = self.interrupt[1], None
            act()
        return self.now


@pytest.fixture
def made() -> Iterator[list[Supervisor]]:
    found: list[Supervisor] = []
    yield found
    for one in found:
        one.close()


def supervisor_of(folder: Path, clock: Clock) -> Supervisor:
    worker = folder / "worker"
    worker.write_text(f"#!/bin/sh\necho '{GOOD.strip()}'; exec sleep 60\n")
    worker.chmod(0o755)
    return Supervisor([str(worker)], clock)


def heard(supervisor: Supervisor) -> bool:
    """Tell whether a worker is heard within some steps."""
    return any(supervisor.step(0.02) for _ in range(200))


@pytest.mark.parametrize("look", range(1, 9))
def test_a_pause_at_any_moment_of_a_start_and_of_a_frame_is_kept(
    look: int, tmp_path: Path, made: list[Supervisor]
) -> None:
    clock = Clock()
    supervisor = supervisor_of(tmp_path, clock)
    made.append(supervisor)
    clock.interrupt = (look, lambda: supervisor.pause(PAUSE))
    for _ in range(200):
        if clock.has_interrupted():
            break
        supervisor.step(0.02)
    assert clock.has_interrupted()
    assert supervisor.is_paused()
    for _ in range(200):
        supervisor.step(0.02)
        if supervisor.fault == "paused" or not supervisor.starts:
            break
    starts = supervisor.starts
    assert starts <= 1
    for _ in range(20):
        assert supervisor.step(0.0) == []
    assert supervisor.starts == starts
    clock.now += PAUSE + 1
    assert heard(supervisor), supervisor.fault


def test_who_resumes_does_not_wait_for_the_rest_of_a_back_off(
    tmp_path: Path, made: list[Supervisor]
) -> None:
    clock = Clock()
    supervisor = supervisor_of(tmp_path, clock)
    made.append(supervisor)
    assert heard(supervisor)
    supervisor.pause(PAUSE)
    for _ in range(20):
        supervisor.step(0.01)
    assert (supervisor.starts, supervisor.fault) == (1, "paused")
    supervisor.resume()
    assert heard(supervisor), supervisor.fault
    assert supervisor.starts == 2
