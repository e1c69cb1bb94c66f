# SPDX-License-Identifier: Apache-2.0
"""SHARE_MPS: MPS comes with the first share of a card and goes with the last; real processes."""

from __future__ import annotations

import os
import pwd
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.alloc.process_owner import FOREIGN, OWNERS, classify_process
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.release import release_locks
from gpulock.daemon.health.health_command import CardTakenError, lock_for_check
from gpulock.daemon.mps import unit
from gpulock.daemon.mps.keeper import CardMps, MpsKeeper
from gpulock.daemon.mps.unit import list_card_folders
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BUSY, Refusal
from gpulock.job import environment
from gpulock.job.mps import wait_for_mps
from gpulock.workstation.process_claims import make_process_owner
from tests.support.fake_mps import FakeMps
from tests.support.journal import HeardJournal
from tests.support.trees import Box, bus, judge_of, let_others_in, soon
from tests.support.wait import wait_until

pytestmark = pytest.mark.slow
PATIENCE = 60.0  # seconds until a test gives up what a loaded machine may take
NOBODY = "nobody"


class Desk(Box):
    """A node of two cards, 4 places on the first, with this machine's processes and a fake MPS."""

    def __init__(self, root: Path, **keys: str) -> None:
        own = {"PROC_ROOT": "/proc", "SHARES": "0:4", "SHARE_MPS": "yes"}
        super().__init__(root, 2, **{**own, **keys})
        self.mps = FakeMps(root / "bin", self.dev / "nvidia0")
        self.lock.mkdir()
        self.inventory(f"gpu.{bus(0)}.memory_mib=8000", boot_id=self.node().boot_id)
        self.journal = HeardJournal()
        self.restart()
        self.jobs: list[subprocess.Popen[bytes]] = []

    def restart(self) -> None:
        """Start gpulockd, or another one after it."""
        self.keeper = MpsKeeper(self.journal)

    def round(self) -> None:
        """Let gpulockd go round once."""
        node = self.node()
        report = reconcile_locks(node, judge_of(node), soon())
        self.keeper.run(node, report, clock_boottime())

    def wait_for(self, done: Callable[[], object]) -> None:
        """Let gpulockd go on until something is so."""
        self.round()

        def so() -> bool:
            if done():
                return True
            self.keeper.run_due(clock_boottime())
            return False

        wait_until(so, why=lambda: str(self.journal.said()))

    def start(self, user: int | None = None) -> subprocess.Popen[bytes]:
        """Start a job that does nothing, of this user or another."""
        words = ["sleep", "1000"]
        self.jobs.append(subprocess.Popen(words, start_new_session=True, user=user))
        return self.jobs[-1]

    def start_nobody(self) -> subprocess.Popen[bytes]:
        """Start a job of another user, whom the folders let in."""
        let_others_in(self.root)
        (self.dev / "nvidia0").chmod(0o666)
        return self.start(pwd.getpwnam(NOBODY).pw_uid)

    def claim(self, pid: int, count: int = 1, share: bool = True) -> Grant:
        """Let a process claim places, or whole cards."""
        node = self.node()
        own = make_process_owner(node, pid, "user")
        want = ClaimRequest(count, share=share)
        return claim_devices(node, own, want, lambda: judge_of(node), soon())

    def refused(self, pid: int, count: int = 1, share: bool = True) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.claim(pid, count, share)
        return caught.value

    def end(self, grant: Grant) -> None:
        """Let a job end and its epilog give back what it held."""
        for job in self.jobs:
            if job.pid == grant.owner.pid:
                job.kill()
                job.wait()
        node, token = self.node(), grant.owner.token

        def released() -> bool:
            """On a busy machine one of root's processes may be about to start a program."""
            return not release_locks(
                node, lambda o: o.token == token, judge_of(node), soon(), "end"
            ).kept

        wait_until(released, why="the epilog to give it back")

    def card(self) -> CardMps:
        """Return the first card's MPS."""
        return next(iter(self.keeper.cards.values()))

    def daemon(self) -> int:
        """Return the pid of its daemon."""
        control = self.card().control
        assert control is not None
        return control[0]

    def ready(self, grant: Grant) -> None:
        """Let gpulockd start MPS, for which the job waits."""
        self.wait_for(lambda: self.node().store.read_mps(grant.owner.token))
        wait_for_mps(self.node(), grant.owner, Deadline(0.0))

    def gone(self) -> bool:
        """Return whether the card has no MPS any more."""
        return not list_card_folders(self.node().settings.mps_dir)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(unit, "BIN", str(tmp_path / "bin"))
    one = Desk(tmp_path)
    yield one
    one.mps.stop()
    for job in one.jobs:
        job.kill()
        job.wait()


def test_mps_comes_with_the_first_share_and_goes_with_the_last(desk: Desk) -> None:
    desk.round()
    info = Path(desk.node().settings.mps_dir).stat()
    assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (os.geteuid(), 0o755), "containers bind it"
    first = desk.claim(desk.start().pid)
    desk.ready(first)
    running = desk.mps.processes()
    assert len(running) == 2, "the daemon and its server"
    second = desk.claim(desk.start().pid)
    desk.ready(second)
    desk.end(first)
    desk.round()
    assert desk.mps.processes() == running
    desk.end(second)
    assert desk.locks() == [], "MPS has the card open, and keeps no place"
    desk.wait_for(desk.gone)
    assert desk.mps.processes() == set()
    assert [line.partition(" started")[0] for line in desk.journal.said()] == [
        f"<5>MPS of {bus(0)}",
        f"<5>MPS of {bus(0)} ended",
    ]


def test_the_job_gets_the_pipes_and_the_limits_of_its_place(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid, 3)
    told = dict(environment.grant_variables(grant.devices, desk.node().settings))
    assert told["CUDA_VISIBLE_DEVICES"] == grant.devices[0].uuid
    assert told["CUDA_MPS_PIPE_DIRECTORY"].startswith(desk.node().settings.mps_dir)
    assert ":" not in told["CUDA_MPS_PIPE_DIRECTORY"]
    assert told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "75"
    assert told["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=6000M"
    assert told["APPTAINERENV_CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=6000M"
    desk.ready(grant)


def test_processes_of_mps_are_not_foreign_and_what_is_not_below_them_is(desk: Desk) -> None:
    grant, other = desk.claim(desk.start().pid), desk.start()
    desk.ready(grant)
    node = desk.node()
    locks = list(node.store.read_all_locks().values())
    for lock in locks:
        node.store.read_details([lock])
    tree = ProcessScan(node.proc)
    for pid in desk.mps.processes():
        assert classify_process(pid, locks, tree, ()) == OWNERS
    assert classify_process(other.pid, locks, tree, ()) == FOREIGN


@pytest.mark.parametrize("fault", ["deaf", "deaf-server", "leaves-pipes"])
def test_mps_that_does_not_quit_is_killed_and_its_pipes_are_removed(
    desk: Desk, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.mps.fault(fault)
    monkeypatch.setattr(unit, "STOP_SECONDS", 1)
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    desk.end(grant)
    desk.wait_for(desk.gone)
    assert desk.mps.processes() == set()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("fails", "failed.: An instance of this daemon is already running"),
        ("no-server", ": Server exited with status 1"),
        ("never-ready", " ended with 1: "),
    ],
)
def test_a_job_is_refused_with_the_reason_when_mps_does_not_start(
    desk: Desk, fault: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault != "fails":  # one that is never ready, or has no server, is waited for so long
        monkeypatch.setattr(unit, "START_SECONDS", 2)
    desk.mps.fault(fault)
    grant = desk.claim(desk.start().pid)
    with pytest.raises(Refusal) as caught:
        desk.ready(grant)
    assert caught.value.kind == BUSY, "neither the job nor the queue is at fault"
    assert why in caught.value.why
    desk.wait_for(desk.gone)
    desk.end(grant)
    again = desk.claim(desk.start().pid)
    with pytest.raises(Refusal, match="MPS of this card"):
        desk.ready(again)
    desk.mps.fault()
    desk.end(again)
    monkeypatch.setattr(unit, "START_SECONDS", PATIENCE)
    desk.ready(desk.claim(desk.start().pid))


def test_no_test_of_a_gpu_begins_while_an_mps_ends_on_it(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    desk.end(grant)
    card = next(d for d in desk.node().devices() if d.bus == bus(0))
    with pytest.raises(CardTakenError):
        lock_for_check(desk.node(), card, os.getpid(), 0)
    desk.wait_for(desk.gone)
    assert lock_for_check(desk.node(), card, os.getpid(), 0)


def test_a_job_waits_no_longer_than_its_deadline_where_gpulockd_does_not_run(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid)
    with pytest.raises(Refusal, match="gpulockd has not started it"):
        wait_for_mps(desk.node(), grant.owner, Deadline(0.05))


def test_the_card_is_closed_until_nothing_of_its_mps_is_left(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    desk.end(grant)
    assert desk.refused(desk.start().pid, 2, share=False).kind == BUSY
    assert bus(0) not in desk.claim(desk.start().pid, 1, share=False).owner.devices
    same = desk.claim(desk.start().pid)
    desk.ready(same)
    desk.end(same)
    desk.wait_for(desk.gone)
    assert desk.claim(desk.start().pid, share=False).owner.devices == (bus(0),)


@pytest.mark.parametrize("wanted", ["yes", "no"])
def test_a_restarted_gpulockd_takes_the_daemon_over_and_ends_it_with_the_last_share(
    desk: Desk, wanted: str
) -> None:
    """What runs goes on where SHARE_MPS was switched off meanwhile."""
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    control = desk.daemon()
    running = desk.mps.processes()
    desk.settings["SHARE_MPS"] = wanted
    desk.restart()
    desk.wait_for(lambda: desk.keeper.cards and desk.card().runs())
    assert (desk.daemon(), desk.card().wanted) == (control, {grant.owner.token})
    assert desk.mps.processes() == running
    desk.end(grant)
    desk.restart()
    desk.wait_for(desk.gone)
    assert desk.mps.processes() == set()


def test_what_a_killed_daemon_leaves_is_ended_and_mps_starts_anew(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    before = desk.mps.processes()
    os.kill(desk.daemon(), signal.SIGKILL)
    desk.wait_for(lambda: not set(before) & set(desk.mps.processes()))
    desk.wait_for(desk.gone)
    desk.wait_for(lambda: desk.keeper.cards and desk.card().runs())


def test_a_place_whose_users_process_has_the_card_open_stays_although_mps_may(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    with open(desk.dev / "nvidia0") as card:
        stray = subprocess.Popen(["sleep", "1000"], stdin=card, start_new_session=True)
    desk.jobs[0].kill()
    desk.jobs[0].wait()
    node, token = desk.node(), grant.owner.token
    released = release_locks(node, lambda o: o.token == token, judge_of(node), soon(), "end")
    stray.kill()
    stray.wait()
    assert [why for _, why in released.kept] == [
        f"process {stray.pid} has {grant.owner.devices[0]} open"
    ]


def test_removal_follows_no_link_of_the_user(desk: Desk, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    pipes = Path(desk.card().folder) / "pipe"
    (pipes / "link").symlink_to(precious)
    desk.end(grant)
    desk.wait_for(desk.gone)
    desk.wait_for(lambda: not any(Path(desk.node().settings.mps_dir).glob(".gone.*")))
    assert (precious / "file").exists()


@pytest.mark.another_user
def test_mps_runs_as_the_cards_user_in_folders_that_are_the_users_alone(desk: Desk) -> None:
    user = pwd.getpwnam(NOBODY)
    grant = desk.claim(desk.start_nobody().pid)
    desk.ready(grant)
    pids = desk.mps.processes()
    assert len(pids) == 2
    for pid in pids:
        status = desk.node().proc.status(pid)
        assert status.uids == (user.pw_uid,) * 4
        assert 0 not in status.groups or 0 in os.getgrouplist(NOBODY, user.pw_gid)
    home = Path(desk.card().folder)
    assert (home.stat().st_uid, stat.S_IMODE(home.stat().st_mode)) == (0, 0o755)
    for name in ("pipe", "log"):
        info = (home / name).stat()
        assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (user.pw_uid, 0o700)
    assert desk.refused(desk.start().pid).kind == BUSY, "the card is nobody's"
    desk.end(grant)
    desk.wait_for(desk.gone)
