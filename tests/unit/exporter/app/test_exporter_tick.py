# SPDX-License-Identifier: Apache-2.0
"""The exporter without a worker: real locks and files, frames of a test, ticks that it makes."""

from __future__ import annotations

import _thread
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from gpulock_exporter.app import exporter as app_exporter
from gpulock_exporter.app.exporter import (
    LIST_PERIOD,
    QUIET,
    REASON_CHARACTERS,
    Exporter,
    FaultJournal,
)
from gpulock_exporter.files.publish import ExporterFolder
from gpulock_exporter.frame import Frame
from gpulock_exporter.state import collector_state
from gpulock_exporter.state.join import take_snapshot
from gpulock_exporter.state.snapshot import Moment, NodeSnapshot
from gpulock_exporter.web.http import HttpRequest, HttpResponse
from gpulock_exporter.worker.supervisor import Supervisor

from gpulock.cli.status.status_view import view_node
from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.errors import BROKEN, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import quarantine, verdicts
from gpulock.store.verdicts import ALIVE, DEAD, Verdict
from tests.exporter.whole import Scrape
from tests.support.clock import VirtualClock, boot_time
from tests.support.exporter_nodes import card, listed
from tests.support.faults import raising
from tests.support.locks import place_lock
from tests.support.trees import BOOT, box_at_work, bus, record
from tests.support.wait import wait_until

AGE = 10.0
A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"


class Ticking:
    """An exporter of a node of four GPUs of which five are expected, two of them claimed."""

    def __init__(self, root: Path) -> None:
        self.box = box_at_work(root, EXPECTED_GPUS="5")
        node = self.box.node()
        place_lock(node.store, bus(0), record(token=A))
        place_lock(node.store, bus(1), record(token=B))
        quarantine.write_device_note(
            str(self.box.state), quarantine.QUARANTINE, bus(2), "root", "ECC"
        )
        verdicts.write_verdicts(
            str(self.box.lock), {A: Verdict(ALIVE, ""), B: Verdict(DEAD, "gone")}, BOOT
        )
        self.clock = VirtualClock()
        self.clock.now = boot_time()  # as the verdicts have it
        self.exporter = Exporter(node, lambda: Moment(self.clock.now, self.clock.wall))
        self.exporter.open()
        self._supervisor = Supervisor(["/nonexistent"], self.clock)

    def tick(self, *frames: Frame) -> None:
        """Do what is due each second."""
        self.exporter.tick(frames, self._supervisor)

    def get(self, path: str, query: str = "") -> HttpResponse:
        """Return an answer."""
        return self.exporter.handler()(HttpRequest(path, query))

    def status(self, path: str) -> int:
        """Return the status of an answer."""
        return self.get(path).status

    def look(self, *frames: Frame) -> tuple[Scrape, list[str]]:
        """Tick; return what is told then, and the state of each card."""
        self.tick(*frames)
        found = Scrape(self.get("/metrics").body.decode())
        return found, [found.states(gpu=str(number))[0] for number in range(4)]


@pytest.fixture
def ticking(tmp_path: Path) -> Ticking:
    return Ticking(tmp_path)


@pytest.mark.parametrize(("query", "refresh"), [("", []), ("live", ["5"]), ("live=1", ["5"])])
def test_the_page_loads_itself_again_only_for_who_asks(
    ticking: Ticking, query: str, refresh: list[str]
) -> None:
    ticking.tick()
    answer = ticking.get("/", query)
    assert "default-src 'none'" in dict(answer.headers)["Content-Security-Policy"]
    assert [value for name, value in answer.headers if name == "Refresh"] == refresh
    assert (b"stand still" in answer.body) is bool(refresh)


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy"])
def test_once_its_ticks_are_overdue_it_says_that_it_hangs(ticking: Ticking, path: str) -> None:
    assert ticking.status(path) == (200 if path == "/-/healthy" else 503), "before the first tick"
    ticking.tick()
    ticking.clock.now += AGE - 0.5
    assert ticking.status(path) == 200
    ticking.clock.now += 1
    answer = ticking.get(path)
    assert answer.status == 503
    assert re.search(rb"the exporter itself hangs", answer.body)
    ticking.tick()
    assert ticking.status(path) == 200


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        (collector_state, "classify_device_processes", "foreign"),
        (ExporterFolder, "write_sample", "files"),
    ],
)
def test_a_tick_that_hangs_leaves_what_the_last_one_told(
    ticking: Ticking, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, part: str
) -> None:
    """It may look at a process that hangs in the driver, or write to a disk that is slow."""
    ticking.tick()
    told: list[int] = []

    def hang(*_: object) -> None:
        ask = BackgroundCall(lambda: [ticking.status(path) for path in ("/metrics", "/")])
        told.extend(ask.answer(5.0))
        raise OSError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, hang)
        ticking.tick(Frame(ticking.clock.now, "580", [card(0, processes={4711: 5})]))
        assert told == [200, 200]
        found, _ = ticking.look()
    assert found.one("gpulock_collector_success", collector=part) == 0
    ticking.tick()
    found, _ = ticking.look()
    assert found.one("gpulock_collector_success", collector=part) == 1


def test_what_a_tick_left_is_joined_once_for_all_who_ask(
    ticking: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics and page are written without the lock, while the next tick may change the rest."""
    made: list[float] = []

    def join(*arguments: Any) -> NodeSnapshot:
        made.append(ticking.clock.now)
        return take_snapshot(*arguments)

    monkeypatch.setattr(app_exporter, "take_snapshot", join)
    ticking.tick()
    assert made == [], "nobody has asked"
    assert [ticking.status(path) for path in ("/", "/metrics", "/metrics")] == [200] * 3
    assert len(made) == 1


def test_the_line_of_a_card_ends_where_the_driver_fell_silent(ticking: Ticking) -> None:
    ticking.tick(Frame(ticking.clock.now, "580", [card(0, utilization=0.5)]))
    ticking.clock.now += AGE + 1
    for _ in range(4):
        ticking.tick()
    (line,) = re.findall(rb'<path d="([^"]*)"', ticking.get("/").body)
    assert line.endswith(b"h0"), "one look is a dot"


def test_the_states_are_those_that_status_shows(ticking: Ticking) -> None:
    cards = [card(number, processes={}) for number in range(4)]
    found, told = ticking.look(Frame(ticking.clock.now, "580", cards))
    rows = view_node(ticking.box.node(), judging=False).rows()
    assert told == ["held", "stale", "quarantined", "free"]
    assert [*told, "missing"] == [row.state for row in rows]
    assert found.one("gpulock_gpus", state="missing") == 1
    own = ("virtual_memory_bytes", "resident_memory_bytes", "start_time_seconds", "open_fds")
    told_of_itself = {f"process_{name}" for name in (*own, "max_fds", "cpu_seconds_total")}
    assert found.names() >= told_of_itself


def test_while_the_driver_is_silent_the_last_known_state_and_the_models_are_told(
    ticking: Ticking,
) -> None:
    ticking.box.proc.add(78)
    cards = [card(3, processes={78: None}), card(0), card(1)]
    _, before = ticking.look(Frame(ticking.clock.now, "580", cards, complete=True))
    assert before[2:] == ["missing", "foreign"]
    ticking.clock.now += 60
    found, told = ticking.look()
    assert (found.one("gpulock_nvml_up"), told) == (0, before)
    assert ticking.get("/").body.count(card(0).name.encode()) == 6, "a title and a text each"
    ticking.box.proc.remove(78)
    ticking.clock.now += 1
    assert ticking.look()[1] == [*before[:3], "free"]


def test_a_driver_that_hangs_leaves_what_it_listed_and_one_that_is_gone_nothing(
    ticking: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes late is taken, and while it does not come nobody asks again."""
    begun, let_go, asked = threading.Event(), threading.Event(), list[int]()

    def hang(_: Node) -> list[Device]:
        asked.append(1)
        begun.set()
        let_go.wait()
        return [listed(0)]

    def ids() -> list[str]:
        ticking.clock.now += LIST_PERIOD
        ticking.tick()
        return [one.id for one in ticking.exporter.devices or ()]

    every = [bus(number) for number in range(4)]
    wait_until(lambda: ids() == every, why="the first answer")
    with monkeypatch.context() as patch:
        patch.setattr(Node, "devices", hang)
        assert ids() == every
        begun.wait()
        assert (ids(), asked) == (every, [1])
        let_go.set()
        wait_until(lambda: ids() == [bus(0)], why="the late answer")
    monkeypatch.setattr(Node, "devices", raising(Refusal(BROKEN, "no driver", "load it")))
    wait_until(lambda: ids() == [], why="no driver")
    assert ticking.exporter.devices == [], "which is known, unlike before the first answer"
    monkeypatch.setattr(Node, "devices", hang)
    ticking.tick()
    assert asked == [1], "it is not asked again at once"


def test_a_node_without_room_for_a_thread_costs_one_reading_of_the_drivers_list(
    ticking: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", raising(RuntimeError("can't start new thread")))
        ticking.tick()
    assert ticking.exporter.devices is None

    def listed_again() -> list[Device] | None:
        ticking.clock.now += LIST_PERIOD
        ticking.tick()
        return ticking.exporter.devices

    assert len(wait_until(listed_again, why="the list") or ()) == 4


# --- the journal: what fails is told with its reason, once, and not in a flood -----------------


def test_a_fault_another_reason_and_its_end_are_told_once_each_in_a_line() -> None:
    journal = FaultJournal()
    assert journal.lines({}, 0) == []
    assert journal.lines({"locks": "no such file"}, 1) == ["locks: no such file"]
    assert journal.lines({"locks": "no such file"}, 100) == []
    (line,) = journal.lines({"locks": "a\nb\x1b[31m" + "c" * 1000}, 100)
    assert line.startswith("locks: a?b?[31mccc") and len(line) == len("locks: ") + REASON_CHARACTERS
    assert journal.lines({}, 100 + QUIET) == ["locks: recovered"]
    assert journal.lines({}, 102 + 2 * QUIET) == []


def test_what_comes_and_goes_is_told_now_and_then_and_in_the_end_as_it_is() -> None:
    journal, said = FaultJournal(), list[str]()
    for second in range(100):
        said += journal.lines({"driver": "hangs"} if second % 2 else {}, float(second))
    assert 2 <= len(said) <= 100 / QUIET + 1
    last = journal.lines({}, 200.0)
    assert (said + last)[-1] == "driver: recovered"
