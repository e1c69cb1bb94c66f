# SPDX-License-Identifier: Apache-2.0
"""Nothing that goes wrong in a round ends gpulockd, and nothing is said twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.daemon import main_loop
from gpulock.daemon.app import make_daemon_chores
from gpulock.daemon.core.instance_lock import AlreadyRunningError, InstanceLock
from gpulock.daemon.main_loop import ASK_AGAIN, Rounds
from gpulock.daemon.reconcile.reconcile import Chore, DaemonNode, ReconcileReport
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.slurm import scontrol
from gpulock.store import atomic
from gpulock.store.gate import Gate
from tests.support.clock import VirtualClock
from tests.support.faults import disk_full, raising
from tests.support.journal import HeardJournal
from tests.support.locks import place_lock
from tests.support.scripts import write_script
from tests.support.slurm_site import INVALID, ROOT, SILENT, freezer
from tests.support.slurm_site import Site as SlurmSite
from tests.support.trees import NAME, Box, bus, record, soon


class Counting(Chore):
    """A chore that counts, and does what it is told."""

    def __init__(self, act: Callable[[], None] | None = None) -> None:
        self.seen: list[ReconcileReport] = []
        self._act = act

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        self.seen.append(report)
        if self._act:
            self._act()


class Round:
    """A node and its rounds; `said` is what was said since it was asked last."""

    def __init__(self, root: Path) -> None:
        self.box = Box(root)
        self.box.proc.execd(root)
        self.journal = HeardJournal()
        self.rounds = self.make()

    def make(self, *chores: Chore) -> Rounds:
        node = DaemonNode(Settings(dict(self.box.settings)), NAME)
        return Rounds(node, self.journal, chores)

    def go(self, times: int = 1) -> ReconcileReport | None:
        reports = [self.rounds.run_round(clock_boottime()) for _ in range(times)]
        return reports[-1]

    def said(self) -> list[str]:
        return self.journal.said()

    def hold(self, number: int, pid: int, **changes: object) -> None:
        one = record(pid=pid, token=f"t{pid}", devices=(bus(number),), **changes)
        place_lock(self.box.node().store, bus(number), one)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Round]:
    made = Round(tmp_path)
    yield made
    made.rounds.single.release()


def test_a_driver_that_hangs_is_not_asked_again_for_a_reload_of_the_settings(one: Round) -> None:
    asked = one.rounds.node.caller
    one.rounds.use_settings(Settings(dict(one.box.settings)))
    assert one.rounds.node.caller is asked


def test_a_round_frees_what_a_dead_owner_held_and_says_the_proof(one: Round) -> None:
    one.go()
    one.hold(0, 501)
    one.go()
    (line,) = one.said()
    assert line.startswith(f"<5>freed {bus(0)} of job 12 (alice): its shepherd is gone")
    assert one.box.locks() == []


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_bytes(b"<0>panic\x1b[2J\n")])
def test_a_record_that_cannot_be_understood_is_told_once_and_never_freed(
    one: Round, make: Callable[[Path], object]
) -> None:
    one.go()
    path = one.box.lock / "locks" / bus(0) / "owner"
    path.parent.mkdir()
    make(path)
    assert one.go(5) is not None
    assert len(one.said()) == 1
    assert one.box.locks() == [bus(0)]


def test_a_gate_that_stays_shut_is_said_once_and_tried_again(
    one: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.go()
    monkeypatch.setattr(main_loop, "ROUND_SECONDS", 0.01)
    with Gate(str(one.box.records), soon()):
        assert one.go(3) is None
    said = one.said()
    assert len(said) == 1
    assert "timed out on the lock" in said[0]
    assert one.go() is not None
    assert one.said()[0].startswith("<6>no longer: ")


def test_a_full_disk_stops_no_round(one: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    one.go()
    one.hold(0, 501)
    monkeypatch.setattr(atomic, "replace_file", disk_full)
    assert one.go(3) is not None
    said = [line for line in one.said() if "cannot be published" in line]
    assert len(said) == 1
    assert one.box.locks() == []


def test_another_gpulockd_ends_this_one(one: Round) -> None:
    one.box.lock.mkdir()
    other = InstanceLock()
    other.take(str(one.box.lock))
    with pytest.raises(AlreadyRunningError):
        one.go()


def test_a_chore_that_fails_is_said_once_and_stops_no_other(one: Round) -> None:
    good = Counting()
    one.rounds = one.make(Counting(raising(ValueError("no such thing"))), good)
    one.go(3)
    (line,) = one.said()
    assert "Counting failed: ValueError: no such thing (faults.py:" in line
    assert len(good.seen) == 3


def test_what_a_chore_writes_the_later_ones_see_in_the_same_round() -> None:
    names = [type(chore).__name__ for chore in make_daemon_chores(HeardJournal())]
    assert names[0] == "HistoryWriter", "it waits for no other"
    after = names[names.index("HealthPolicy") :]  # a quarantine takes an id out at once
    assert {"CardChecker", "RsmapSync"} <= {*after}


def test_an_unforeseen_fault_in_a_round_is_said_with_its_place(
    one: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_loop, "reconcile_locks", raising(KeyError("surprise")))
    assert one.go(2) is None
    (line,) = one.said()
    assert "KeyError: 'surprise' (faults.py:" in line


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an answer take as long as this machine needs."""
    monkeypatch.setattr(scontrol, "ANSWER_SECONDS", 20.0)


def test_gpulockd_frees_in_the_round_in_which_slurmctld_is_back(
    tmp_path: Path, clock: VirtualClock
) -> None:
    slurm = SlurmSite(tmp_path)
    slurm.process(60, "slurmd", uid=ROOT)
    slurm.prolog(12, "0")
    slurm.fails(SILENT)
    made = Rounds(DaemonNode(Settings(dict(slurm.settings))), HeardJournal(), ())
    for minute in range(3):
        for _ in range(2):
            made.run_round(clock.now)
            clock.now += ASK_AGAIN / 2
        assert [call[0] for call in slurm.calls()] == ["squeue"] * (minute + 1)
    slurm.fails(INVALID)
    report = made.run_round(clock.now)
    assert report is not None
    assert [outcome.act for outcome in report.outcomes] == ["freed"]
    made.close()


def test_of_a_slurm_job_each_step_daemon_and_each_process_is_waited_for(tmp_path: Path) -> None:
    slurm = SlurmSite(tmp_path)
    slurm.prolog(12, "0")
    steps = [slurm.stepd(pid, f"12.{step}") for pid, step in ((700, "extern"), (701, "batch"))]
    tasks = [slurm.process(pid, "python") for pid in (900, 901)]
    slurm.cgroup(f"{freezer()}/step_0", *tasks)
    made = Rounds(DaemonNode(Settings(dict(slurm.settings))), HeardJournal(), ())
    report = made.run_round(0.0)
    made.close()
    assert report is not None
    assert {pid for pid, _ in report.processes if pid} == {*steps, *tasks}


def test_an_odd_answer_about_one_job_keeps_nobody_from_asking_about_another(
    tmp_path: Path, clock: VirtualClock
) -> None:
    write_script(tmp_path / "squeue", f'[ "$5" = 12 ] && exit 0\necho "{INVALID}"\nexit 1')
    node = DaemonNode(Box(tmp_path / "node", SLURM_BINARIES=str(tmp_path)).node().settings)
    made = Rounds(node, HeardJournal(), ())
    for _ in range(3):
        asking = made.ask_slurmctld()
        for _ in range(2):
            with pytest.raises(Refusal):
                asking.job("12")
            assert asking.job("13") is None
