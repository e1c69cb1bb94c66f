# SPDX-License-Identifier: Apache-2.0
"""The supervisor never waits for its worker: real child processes, a clock of the test's own."""

from __future__ import annotations

import pytest
from gpulock_exporter.telemetry import Frame
from gpulock_exporter.worker.supervisor import Supervisor

from tests.support.exporter_workers import LIMITS, Nest, children
from tests.support.pairs import pairwise

pytestmark = pytest.mark.slow


def frames(supervisor: Supervisor, count: int = 1) -> list[Frame]:
    """Step until so many frames came: the child takes its own time."""
    found: list[Frame] = []
    for _ in range(1200):
        found += supervisor.step(0.05)
        if len(found) >= count:
            return found
    raise AssertionError(f"no frame; {supervisor.fault}")


def settle(supervisor: Supervisor, word: str) -> None:
    """Step until the fault speaks of `word`."""
    for _ in range(1200):
        if word in supervisor.fault:
            return
        supervisor.step(0.05)
    raise AssertionError(f"{supervisor.fault!r} does not speak of {word!r}")


def test_a_worker_that_falls_silent_is_killed_and_another_one_started(nest: Nest) -> None:
    supervisor = nest.supervise('echo "$GOOD"; exec sleep 60')
    frames(supervisor)
    nest.clock.now += 5.1
    supervisor.step(0)
    assert "has not answered for 5 s" in supervisor.fault
    assert settle_start(nest, supervisor, 2) or frames(supervisor)


def settle_start(nest: Nest, supervisor: Supervisor, starts: int) -> list[Frame]:
    """Step until the worker is started for the n-th time; return what it sent already.

    The one before takes its own time to end, and the clock's stands still.
    """
    for _ in range(3000):
        if not children() - nest.others:
            break
        supervisor.step(0.01)
    for _ in range(400):
        found = supervisor.step(0.01)
        if supervisor.starts == starts:
            return found
        nest.clock.now += 0.1
    raise AssertionError(f"{supervisor.starts} starts")


def test_a_worker_that_ends_leaves_its_last_words(nest: Nest) -> None:
    supervisor = nest.supervise("echo 'Driver Not Loaded' >&2; exit 3")
    settle(supervisor, "Driver Not Loaded")


def test_starts_grow_rare_until_a_frame_comes(nest: Nest) -> None:
    supervisor = nest.supervise("exit 3")
    begun: list[float] = []
    for _ in range(20_000):
        before = supervisor.starts
        supervisor.step(0.001)
        if supervisor.starts > before:
            begun.append(nest.clock.now)
            while children() - nest.others:  # it takes its own time, and the clock's stands still
                supervisor.step(0.01)
        if len(begun) == 8:
            break
        nest.clock.now += 0.05
    gaps = [round(b - a) for a, b in pairwise(begun)]
    assert gaps[0] <= 2 and gaps == sorted(gaps) and 29 <= gaps[-1] <= 32, gaps


@pytest.mark.parametrize(
    "line", ["garbage", "{}", "[]", '{"sequence":"x","boottime":1,"wall":1}', '{"version":2}']
)
def test_garbage_ends_the_worker(nest: Nest, line: str) -> None:
    supervisor = nest.supervise(f"echo '{line}'; exec sleep 60")
    settle(supervisor, "")
    for _ in range(1200):
        if supervisor.step(0.05) or supervisor.fault:
            break
    assert supervisor.fault
    assert supervisor.worker is not None and supervisor.worker.killed


def test_what_a_worker_says_between_frames_is_not_kept(nest: Nest) -> None:
    go = nest.root / "go"
    wait = f"while ! [ -e {go} ]; do sleep 0.02; done"
    supervisor = nest.supervise(f'echo noise >&2; echo "$GOOD"; {wait}; echo "the end" >&2')
    frames(supervisor)
    go.touch()
    settle(supervisor, "the end")
    assert supervisor.fault == "the end"


def test_a_program_that_is_not_there_is_said(nest: Nest) -> None:
    nest.made.append(Supervisor(["/no/such/worker"], nest.clock, LIMITS))
    nest.made[-1].step(0)
    assert "does not start" in nest.made[-1].fault
