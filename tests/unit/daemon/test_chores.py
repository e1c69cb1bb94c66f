# SPDX-License-Identifier: Apache-2.0
"""A chore of gpulockd runs when its setting is on and its input changed; none is missed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.daemon.app import make_daemon_chores
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.reconcile import schedule
from gpulock.daemon.reconcile.driver import DaemonNode
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import Chore
from gpulock.daemon.rounds import Rounds
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store import events, quarantine
from gpulock.store.verdicts import PERIOD
from tests.support.journal import HeardJournal
from tests.support.locks import place_lock
from tests.support.trees import NAME, Box, bus, record

ON = {
    **{"QUARANTINE_ON": "xid", "IDLE_WARN": "60", "CDI_DIR": "/nowhere", "SGE_ROOT": "/nowhere"},
    "QUARANTINE_RESET": "yes",
}
OFF = {"QUARANTINE_ON": ""}
ALWAYS = {"HistoryWriter"}
# by what changes: the chores that follow, with every setting on, and with none
EXPECTED = {
    schedule.LOCKS: (
        {
            *("HealthPolicy", "IdlePolicy", "CardResetter", "CardChecker"),
            "ClaimEnds",
            *("MpsKeeper", "RefusalNotifier"),  # the dead owner's lock is freed: an event
        },
        {"ClaimEnds", "HealthPolicy", "CardChecker", "MpsKeeper", "RefusalNotifier"},
    ),
    schedule.DEVICES: (
        {
            *("InventoryPublisher", "HealthPolicy", "CdiSpecWriter", "SlurmDrainSync"),
            "SlurmMapRenewal",
        },
        {"InventoryPublisher", "HealthPolicy", "SlurmDrainSync", "SlurmMapRenewal"},
    ),
    schedule.SAMPLE: (
        {"HealthPolicy", "IdlePolicy"},
        {"HealthPolicy"},
    ),
    schedule.INVENTORY: ({"InventoryPublisher"}, {"InventoryPublisher"}),
    schedule.QUARANTINE: (
        {"HealthPolicy", "SlurmDrainSync", "RsmapSync", "CardResetter", "CardChecker"},
        {"HealthPolicy", "SlurmDrainSync", "CardChecker"},
    ),
    schedule.EVENTS: ({"RefusalNotifier"}, {"RefusalNotifier"}),
    schedule.TIME: (
        {
            *(
                "InventoryPublisher",
                "HealthPolicy",
                "CdiSpecWriter",
                "IdlePolicy",
            ),
            *("RefusalNotifier", "RsmapSync", "SlurmDrainSync", "ForeignWatch"),
            *("CardResetter", "CardChecker", "MpsKeeper", "TemporaryRemover"),
            *("ClaimEnds", "SlurmMapRenewal"),
        },
        {
            *("InventoryPublisher", "HealthPolicy", "RefusalNotifier"),
            *("ClaimEnds", "SlurmDrainSync", "ForeignWatch", "CardResetter"),
            *("CardChecker", "MpsKeeper", "TemporaryRemover", "SlurmMapRenewal"),
        },
    ),
}


class Watched:
    """A node with gpulockd's own chores, which note that they run instead of running."""

    def __init__(self, root: Path, settings: dict[str, str]) -> None:
        self.exporter = root / "run-exporter"
        self.exporter.mkdir()
        self.box = Box(root, 4, **settings)
        self.box.proc.execd(root)
        journal = HeardJournal()
        self.chores = make_daemon_chores(journal)
        self.ran: set[str] = set()
        self.failing = ""
        for chore in self.chores:
            self.watch(chore)
        self.rounds = Rounds(DaemonNode(self.settings(), NAME), journal, self.chores)
        self.now = 1000.0

    def settings(self, **more: str) -> Settings:
        return Settings(self.box.settings | more)

    def watch(self, chore: Chore) -> None:
        name = type(chore).__name__

        def run(node: Node, report: ReconcileReport, now: float) -> None:
            self.ran.add(name)
            if name == self.failing:
                raise ValueError("it fails")

        chore.__dict__["run"] = run

    def go(self, later: float = 1.0) -> set[str]:
        """Do a round; return the chores that ran."""
        self.ran.clear()
        self.now += later
        self.rounds.run_round(self.now)
        return set(self.ran)

    def rest(self) -> None:
        """Do rounds until nothing changes, with an old folder: a tick of a clock tells nothing."""
        self.go()
        os.utime(self.box.state / quarantine.FOLDER, (1, 1))
        self.go()
        assert self.go() == ALWAYS

    def change(self, what: str) -> float:
        """Let something change; return how many seconds later it is seen."""
        acts: dict[str, Callable[[], object]] = {
            schedule.LOCKS: lambda: place_lock(self.box.node().store, bus(0), record(pid=501)),
            schedule.DEVICES: lambda: self.box.gpu(bus(4), 4),
            schedule.SAMPLE: lambda: (self.exporter / "sample").write_text("x"),
            schedule.INVENTORY: lambda: (self.exporter / "inventory").write_text("x"),
            schedule.QUARANTINE: lambda: quarantine.write_device_note(
                str(self.box.state), quarantine.QUARANTINE, bus(1), "root", "it smells"
            ),
            schedule.EVENTS: lambda: events.note_event(
                str(self.box.lock), events.REFUSED, "7", "no"
            ),
            schedule.TIME: lambda: None,
        }
        acts[what]()
        return PERIOD if what == schedule.TIME else 1.0


@pytest.fixture(params=["on", "off"])
def watched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Watched]:
    made = Watched(tmp_path, ON if request.param == "on" else OFF)
    yield made
    made.rounds.single.release()


def is_on(watched: Watched) -> bool:
    return bool(watched.box.settings.get("CDI_DIR"))


def names(watched: Watched) -> set[str]:
    return {type(chore).__name__ for chore in watched.chores}


@pytest.mark.parametrize("what", EXPECTED)
def test_a_chore_runs_when_its_setting_is_on_and_its_input_changed(
    watched: Watched, what: str
) -> None:
    watched.rest()
    later = watched.change(what)
    assert watched.go(later) == EXPECTED[what][0 if is_on(watched) else 1] | ALWAYS
    watched.go()  # a lock that was freed is gone by then
    assert watched.go() == ALWAYS


def test_each_input_and_setting_that_a_chore_names_is_tested(tmp_path: Path) -> None:
    known = vars(Settings({}))
    for chore in make_daemon_chores(HeardJournal()):
        for what, settings in chore.after.items():
            assert what == schedule.ROUND or type(chore).__name__ in EXPECTED[what][0]
            assert set(settings) <= set(known)


def test_a_quarantine_that_a_chore_writes_drains_the_node_in_the_same_round(tmp_path: Path) -> None:
    watched = Watched(tmp_path, ON)
    watched.rest()
    policy = next(chore for chore in watched.chores if type(chore).__name__ == "HealthPolicy")
    noted = policy.run

    def quarantine_a_device(node: Node, report: ReconcileReport, now: float) -> None:
        noted(node, report, now)
        watched.change(schedule.QUARANTINE)

    policy.__dict__["run"] = quarantine_a_device
    watched.change(schedule.SAMPLE)
    assert watched.go() >= {"HealthPolicy", "SlurmDrainSync", "RsmapSync"}
    watched.rounds.single.release()


def test_at_the_start_all_run(watched: Watched) -> None:
    assert watched.go() == names(watched)


def test_after_a_round_that_failed_all_run(watched: Watched) -> None:
    watched.rest()
    watched.box.lock.chmod(0o777)
    assert watched.go() == set()
    watched.box.lock.chmod(0o755)
    assert watched.go() == names(watched)
    assert watched.go() == ALWAYS


def test_after_the_settings_were_read_again_all_run(watched: Watched) -> None:
    watched.rest()
    watched.rounds.use_settings(watched.settings(IDLE_WARN="0", CDI_DIR=""))
    watched.rounds.node.name = NAME
    assert watched.go() == names(watched)
    assert watched.go() == ALWAYS


@pytest.mark.parametrize("name", ["HealthPolicy", "InventoryPublisher"])
def test_a_chore_that_failed_runs_in_each_round_until_it_does_not(
    watched: Watched, name: str
) -> None:
    watched.rest()
    watched.change(schedule.QUARANTINE)
    watched.change(schedule.INVENTORY)
    watched.failing = name
    assert name in watched.go()
    assert watched.go() == {name} | ALWAYS
    watched.failing = ""
    assert watched.go() == {name} | ALWAYS
    assert watched.go() == ALWAYS


def test_what_changes_while_chores_run_is_seen_by_the_next_round(watched: Watched) -> None:
    watched.rest()
    later = next(chore for chore in watched.chores if type(chore).__name__ == "ForeignWatch")
    run = later.run

    def publish(node: Node, report: ReconcileReport, now: float) -> None:
        later.__dict__["run"] = run
        (watched.exporter / "inventory").write_text("x")

    later.__dict__["run"] = publish
    assert "InventoryPublisher" in watched.go(PERIOD)  # it ran before that change
    assert watched.go() >= {"InventoryPublisher"}
    assert watched.go() == ALWAYS


def test_the_history_is_written_before_any_other_chore_may_wait(tmp_path: Path) -> None:
    assert isinstance(make_daemon_chores(HeardJournal())[0], HistoryWriter)


def test_time_changes_a_period_after_it_did_however_many_rounds_come(watched: Watched) -> None:
    watched.rest()
    first = watched.rounds.regular
    while watched.now < first - 1:
        assert watched.go() == ALWAYS
    assert "ForeignWatch" in watched.go()
    assert watched.rounds.regular == watched.now + PERIOD
