# SPDX-License-Identifier: Apache-2.0
"""A pause comes by a signal, between any two instructions of the supervisor: it is never lost."""

from __future__ import annotations

import pytest
from gpulock_exporter.worker.supervisor import Supervisor

from tests.support.exporter_workers import Nest, children

PAUSE = 60.0
WORKER = 'echo "$GOOD"; exec sleep 60'


def heard(supervisor: Supervisor) -> bool:
    """Tell whether a worker is heard within some steps."""
    return any(supervisor.step(0.02) for _ in range(200))


@pytest.mark.parametrize("look", range(1, 9))
def test_a_pause_at_any_moment_of_a_start_and_of_a_frame_is_kept(look: int, nest: Nest) -> None:
    clock, supervisor = nest.clock, nest.supervise(WORKER)
    clock.interrupts[look] = lambda: supervisor.pause(PAUSE)
    for _ in range(200):
        if not clock.interrupts:
            break
        supervisor.step(0.02)
    assert not clock.interrupts
    assert supervisor.is_paused()
    for _ in range(200):
        supervisor.step(0.02)
        if supervisor.fault == "paused" or not supervisor.starts:
            break
    starts = supervisor.starts
    assert starts <= 1
    for _ in range(20):
        assert supervisor.step(0.0) == []
    for _ in range(3000):
        if children() <= nest.others:  # the kernel has ended the worker, in its own time
            break
        assert supervisor.step(0.02) == []
    assert supervisor.starts == starts
    clock.now += PAUSE + 1
    assert heard(supervisor), supervisor.fault


def test_who_resumes_does_not_wait_for_the_rest_of_a_back_off(
    nest: Nest,
) -> None:
    supervisor = nest.supervise(WORKER)
    assert heard(supervisor)
    supervisor.pause(PAUSE)
    for _ in range(20):
        supervisor.step(0.01)
    assert (supervisor.starts, supervisor.fault) == (1, "paused")
    supervisor.resume()
    assert heard(supervisor), supervisor.fault
    assert supervisor.starts == 2
