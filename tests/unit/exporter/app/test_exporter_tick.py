# SPDX-License-Identifier: Apache-2.0
"""An exporter whose own look hangs tells nothing old: Prometheus sees it down, not all well."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from gpulock_exporter.app.exporter import Exporter
from gpulock_exporter.clock import Moment
from gpulock_exporter.web.http import HttpRequest
from gpulock_exporter.worker.supervisor import Supervisor

from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from tests.support.clock import VirtualClock

AGE = 10.0


class Ticking:
    """An exporter of two cards without a worker."""

    def __init__(self, root: Path) -> None:
        node = write_simulated_node(root / "node", "dgx1", 2)
        self.clock = VirtualClock()
        self._config = str(node.config)
        self.folder = node.exporter_dir
        self.exporter = self.again()
        self.exporter.open()
        self.exporter.device_list.read()
        self._supervisor = Supervisor(["/nonexistent"], self.clock)

    def now(self) -> Moment:
        """Return this moment."""
        return Moment(self.clock.now, self.clock.wall)

    def again(self, say: Callable[[str], object] = str) -> Exporter:
        """Return an exporter of this node as it starts."""
        return Exporter(Node(read_settings(self._config)), self.now, say)

    def tick(self) -> None:
        """Do what is due each second."""
        self.exporter.tick([], self._supervisor)

    def status(self, path: str) -> int:
        """Return the status of an answer."""
        return self.exporter.handler()(HttpRequest(path)).status


@pytest.fixture
def ticking(tmp_path: Path) -> Ticking:
    return Ticking(tmp_path)


def test_before_the_first_tick_nobody_is_told_anything(ticking: Ticking) -> None:
    assert [ticking.status(path) for path in ("/metrics", "/", "/-/healthy")] == [503, 503, 200]


@pytest.mark.parametrize(("query", "refresh"), [("", []), ("live", ["5"]), ("live=1", ["5"])])
def test_the_page_loads_itself_again_only_for_who_asks(
    ticking: Ticking, query: str, refresh: list[str]
) -> None:
    ticking.tick()
    answer = ticking.exporter.handler()(HttpRequest("/", query))
    assert [value for name, value in answer.headers if name == "Refresh"] == refresh
    assert (b"stand still" in answer.body) is bool(refresh)


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy"])
def test_once_its_ticks_are_overdue_it_says_that_it_hangs(ticking: Ticking, path: str) -> None:
    ticking.tick()
    ticking.clock.now += AGE - 0.5
    assert ticking.status(path) == 200
    ticking.clock.now += 1
    answer = ticking.exporter.handler()(HttpRequest(path))
    assert answer.status == 503
    assert re.search(rb"the exporter itself hangs", answer.body)
    ticking.tick()
    assert ticking.status(path) == 200
