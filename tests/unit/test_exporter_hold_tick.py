# SPDX-License-Identifier: Apache-2.0
"""An exporter whose own look hangs tells nothing old: Prometheus sees it down, not all well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpulock_exporter.clock import Moment
from gpulock_exporter.exporter import Exporter
from gpulock_exporter.response import Request
from gpulock_exporter.supervisor import Supervisor

from gpulock.node import Node
from gpulock.settings import load
from gpulock.simulate.node import write_node

AGE = 10.0


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.seconds = 5000.0

    def now(self) -> Moment:
        """Return this moment."""
        return Moment(self.seconds, 1.7e9 + self.seconds)


class Ticking:
    """An exporter of two cards without a worker."""

    def __init__(self, root: Path) -> None:
        node = write_node(root / "node", "dgx1", 2)
        with node.config.open("a") as file:
            file.write(f"MAX_SAMPLE_AGE={AGE}\n")
        self.clock = Clock()
        self.exporter = Exporter(Node(load(str(node.config))), self.clock)
        self.exporter.open()
        self.exporter.list_devices()
        self._supervisor = Supervisor(["/nonexistent"], lambda: self.clock.seconds)

    def tick(self) -> None:
        """Do what is due each second."""
        self.exporter.tick([], self._supervisor)

    def status(self, path: str) -> int:
        """Return the status of an answer."""
        return self.exporter.handler()(Request("GET", path)).status


@pytest.fixture
def ticking(tmp_path: Path) -> Ticking:
    return Ticking(tmp_path)


def test_before_the_first_tick_nobody_is_told_anything(ticking: Ticking) -> None:
    assert [ticking.status(path) for path in ("/metrics", "/", "/-/healthy")] == [503, 503, 200]


def test_while_it_ticks_it_answers_without_any_driver(ticking: Ticking) -> None:
    for _ in range(3):
        ticking.tick()
        ticking.clock.seconds += 1
        assert [ticking.status(path) for path in ("/metrics", "/", "/-/healthy")] == [200] * 3


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy"])
def test_once_its_ticks_are_overdue_it_says_that_it_hangs(ticking: Ticking, path: str) -> None:
    ticking.tick()
    ticking.clock.seconds += AGE - 0.5
    assert ticking.status(path) == 200
    ticking.clock.seconds += 1
    answer = ticking.exporter.handler()(Request("GET", path))
    assert answer.status == 503
    assert re.search(rb"the exporter itself hangs", answer.body)
    ticking.tick()
    assert ticking.status(path) == 200
