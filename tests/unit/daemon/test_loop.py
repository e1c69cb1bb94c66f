# SPDX-License-Identifier: Apache-2.0
"""The whole daemon in this process: what makes it go round, and what it is told to do."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from gpulock.daemon import main_loop
from gpulock.daemon.core.journal import SystemdNotifier
from gpulock.daemon.core.loop import DaemonSignals, EventLoop
from gpulock.daemon.main_loop import SETTLING, SPACING, GpulockDaemon, ReconcileSchedule, Rounds
from gpulock.daemon.reconcile.lock_watch import OwnerWatcher
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.daemon.serve_policy import why_users_are_not_served
from gpulock.deadline import clock_boottime
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from gpulock.store.verdicts import PERIOD
from tests.support.clock import VirtualClock
from tests.support.journal import HeardJournal
from tests.support.locks import place_lock
from tests.support.trees import Box

HOLDER = 64_003


class Script(Chore):
    """A chore that does one thing after each round, and ends the daemon after the last."""

    def __init__(self, signals: DaemonSignals, *acts: Callable[[], object]) -> None:
        self.reports: list[ReconcileReport] = []
        self._signals = signals
        self._acts = list(acts)

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        self.reports.append(report)
        if self._acts:
            self._acts.pop(0)()
        else:
            os.kill(os.getpid(), signal.SIGUSR1)


class Field:
    """A simulated node with a gpulockd on it, and a service manager that listens."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.simulated = write_simulated_node(root / "node", "dgx1")
        self.config = str(self.simulated.config)
        self.signals = DaemonSignals()
        signal.set_wakeup_fd(self.signals.wake)
        signal.signal(signal.SIGUSR1, self._end)
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(root / "notify"))
        self.manager.setblocking(False)
        self.journal = HeardJournal()
        self.processes: list[subprocess.Popen[bytes]] = []

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.signals.ending = True

    def run(self, *acts: Callable[[], object]) -> list[ReconcileReport]:
        """Run a gpulockd that does one of `acts` after each round; return its reports."""
        self.signals.ending = False
        script = Script(self.signals, *acts)
        self.daemon(script).run()
        return script.reports

    def daemon(self, chore: Chore) -> GpulockDaemon:
        """Return a gpulockd that has one chore."""
        notify = SystemdNotifier(str(self.root / "notify"))
        settings = read_settings(self.config)
        return GpulockDaemon(settings, self.journal, notify, self.signals, [chore])

    def hold(self, number: int = 0) -> None:
        """Let a process hold a device, of a user whom no other process delays a look at."""
        from gpulock.workstation.process_claims import make_process_owner

        node = Node(read_settings(self.config))
        device = node.devices()[number]
        user = HOLDER if os.geteuid() == 0 else None
        started = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, user=user)
        self.processes.append(started)
        one = make_process_owner(node, started.pid, "alice").copy(
            token=f"a{number}", devices=(device.id,)
        )
        place_lock(node.store, device.id, one)

    def end(self) -> None:
        """End the process that holds."""
        self.processes[-1].kill()
        self.processes[-1].wait()

    def told(self) -> list[str]:
        found: list[str] = []
        while True:
            try:
                found.append(self.manager.recv(4096).decode().partition("\n")[0])
            except BlockingIOError:
                return found

    def said(self) -> str:
        return "\n".join(self.journal.said())


@pytest.fixture
def field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Field]:
    monkeypatch.setattr(main_loop, "SETTLING", 0.0)
    monkeypatch.setattr(main_loop, "SPACING", 0.0)
    made = Field(tmp_path)
    yield made
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    made.manager.close()
    for process in made.processes:
        process.kill()
        process.communicate()


def acts(report: ReconcileReport) -> list[str]:
    return [outcome.act for outcome in report.outcomes]


def test_a_file_that_gets_the_number_of_a_forgotten_one_is_not_told_its_events() -> None:
    """An honest call was dropped for the end of one before, which had its number."""
    loop, told = EventLoop(), list[str]()
    pairs = [os.pipe() for _ in range(2)]
    spare = os.pipe()

    def replace(_: int) -> None:
        told.append("first")
        for reader, _writer in pairs:
            loop.forget(reader)
        other = pairs[1][0]
        os.dup2(spare[0], other)
        loop.watch(other, lambda _: told.append("new"))

    for reader, writer in pairs:
        loop.watch(reader, replace)
        os.write(writer, b"x")
    loop.wait(0.0)
    loop.wait(0.0)
    assert told == ["first"]
    os.write(spare[1], b"x")
    loop.wait(0.0)
    assert told == ["first", "new"]
    for fd in [*pairs[0], *pairs[1], *spare]:
        os.close(fd)


def test_it_says_that_it_is_ready_and_that_it_ends(field: Field) -> None:
    field.run()
    assert field.told() == ["STATUS=0 of 8 devices held", "READY=1", "STOPPING=1"]


class Busy(Script):
    """A chore with work between the rounds: two turns after a round, then none."""

    due = 0.0
    runs = closed = 0

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        self.reports.append(report)

    def run_due(self, now: float) -> None:
        self.runs += 1
        self._signals.ending = self.runs == 2

    def close(self) -> None:
        self.closed += 1


def test_a_chore_goes_on_between_the_rounds_and_lets_go_at_the_end(field: Field) -> None:
    chore = Busy(field.signals)
    field.daemon(chore).run()
    assert (len(chore.reports), chore.runs, chore.closed) == (1, 2, 1)


@pytest.mark.attack
@pytest.mark.parametrize("serves", ["yes", "no"])
def test_a_reconcile_that_took_long_leaves_as_much_time_to_users_calls(
    field: Field, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock, serves: str
) -> None:
    """Tried: claims that end again and again, of a user with 160,000 files to look at each time.

    Stopped by: after a reconcile of four seconds users' calls have four seconds to themselves.
    """
    Path(field.config).write_text(f"{Path(field.config).read_text()}USER_CLAIMS={serves}\n")
    dues: list[float] = []

    class Long(Chore):
        def run(self, node: Node, report: ReconcileReport, now: float) -> None:
            clock.now += 4.0

    def wait(_: EventLoop, until: float) -> None:
        daemon.pace.request_reconcile(clock.now)
        dues.append(daemon.reconcile_due() - clock.now)
        field.signals.ending = True

    monkeypatch.setattr(EventLoop, "wait", wait)
    daemon = field.daemon(Long())
    daemon.run()
    assert [due >= 4.0 for due in dues] == [serves == "yes"]


def test_a_new_lock_wakes_gpulockd_and_so_does_the_end_of_its_owner(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = OwnerWatcher.follow

    def end_once_it_is_watched(watch: OwnerWatcher, report: ReconcileReport, proc: Proc) -> None:
        follow(watch, report, proc)
        if acts(report) == ["held"]:
            field.end()

    monkeypatch.setattr(OwnerWatcher, "follow", end_once_it_is_watched)
    field.run()
    reports = field.run(field.hold, lambda: None)
    assert [acts(report) for report in reports] == [[], ["held"], ["freed"]]


def test_a_reconcile_that_failed_is_tried_again_within_seconds(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        field.signals.ending = True

    monkeypatch.setattr(Rounds, "run_round", fail)
    gpulockd = field.daemon(Chore())
    gpulockd.run()
    assert gpulockd.pace.due - clock_boottime() <= main_loop.AGAIN


@pytest.mark.parametrize("emptied", [True, False])
def test_locks_that_somebody_removes_are_put_back_at_once_and_told(
    field: Field, emptied: bool
) -> None:
    locks = Path(field.simulated.lock_dir, "locks")

    def lose() -> None:
        shutil.rmtree(locks)
        if emptied:
            locks.mkdir()

    field.run()
    reports = field.run(field.hold, lose)
    assert [acts(report) for report in reports] == [[], ["held"], ["held"]]
    assert len(reports[2].restored) == 1
    assert "lock or record was removed" in field.said()
    assert len(os.listdir(locks)) == 1


@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [
        ("w", "green\n", ["not KEY=VALUE: 'green'; the settings stay as they were"]),
        ("a", "COLOUR=green\n", ["unknown key 'COLOUR'", "the settings were read again"]),
    ],
    ids=["a bad file changes nothing", "a key that is not known leaves the others"],
)
def test_settings_are_read_again_and_what_is_wrong_with_them_is_told(
    field: Field, mode: str, text: str, said: list[str]
) -> None:
    def change() -> None:
        with open(field.config, mode) as file:
            file.write(text)
        field.signals.reload = True

    reports = field.run(change)
    assert [len(report.devices) for report in reports] == [8, 8]
    heard = field.said()
    assert [one for one in said if one not in heard] == []
    told = field.told()
    assert "RELOADING=1" in told and told[-2:] == ["READY=1", "STOPPING=1"]


@pytest.mark.parametrize(
    ("keys", "file", "why"),
    [
        ({}, "other", ""),
        ({"SGE_ROOT": "/opt/sge"}, "other", "Grid Engine"),
        ({}, "slurm-map", "Slurm"),
        ({"USER_CLAIMS": "no"}, "other", "USER_CLAIMS"),
    ],
)
def test_users_are_served_where_no_scheduler_is_set_up(
    tmp_path: Path, keys: dict[str, str], file: str, why: str
) -> None:
    box = Box(tmp_path, 4, **{"USER_CLAIMS": "yes", **keys})
    (box.state / file).touch()
    told = why_users_are_not_served(box.node())
    assert why in told and bool(told) == bool(why)


NEVER = float("inf")


@pytest.mark.parametrize(
    ("changed", "next_at", "due"),
    [
        (None, NEVER, 100.0 + PERIOD),
        (110.0, NEVER, 110.0 + SETTLING),
        (100.1, NEVER, 100.0 + SPACING),  # a storm of changes is one reconcile now and then
        (100.0 + PERIOD - SETTLING / 2, NEVER, 100.0 + PERIOD),  # it is never put off
        (None, 110.0, 110.0),  # a chore has work then
        (None, 99.0, 100.0 + SPACING),
        (None, 900.0, 100.0 + PERIOD),
    ],
)
def test_the_next_is_due_after_a_period_or_a_change_or_when_a_chore_has_work(
    changed: float | None, next_at: float, due: float
) -> None:
    pace = ReconcileSchedule(90.0)
    assert pace.due == 90.0, "the first, at once"
    pace.record_reconcile(100.0, next_at)
    if changed:
        pace.request_reconcile(changed)
    assert pace.due == due


def test_a_chore_brings_the_next_reconcile_forward(field: Field) -> None:
    """As the end of a claim does: its card was held half a minute longer."""
    at = clock_boottime() + PERIOD / 2

    def ask() -> None:
        script.reports[0].next_at = at
        field.signals.ending = True

    script = Script(field.signals, ask)
    gpulockd = field.daemon(script)
    gpulockd.run()
    assert gpulockd.pace.due == at
