# SPDX-License-Identifier: Apache-2.0
"""SHARE_MPS: MPS comes with the first share of a card and goes with the last; real processes."""

from __future__ import annotations

import _thread
import os
import pwd
import select
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.alloc.process_owner import FOREIGN, OWNERS, ProcessTree, classify_process
from gpulock.alloc.release import release_locks
from gpulock.daemon.health.health_command import CardTakenError, lock_for_check
from gpulock.daemon.mps import folder, keeper, processes
from gpulock.daemon.mps.keeper import MpsKeeper
from gpulock.daemon.mps.processes import MpsSite, list_mps_processes
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BUSY, INVALID_REQUEST, Refusal
from gpulock.job import environment
from gpulock.job.mps import wait_for_mps
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.workstation.process_claims import make_process_owner
from tests.support.fake_mps import FakeMps
from tests.support.journal import HeardJournal
from tests.support.trees import Box, bus, judge_of, soon
from tests.support.wait import wait_until

pytestmark = pytest.mark.slow
PATIENCE = 60.0  # seconds until a test gives up what a loaded machine may take
NOBODY = "nobody"


class Desk(Box):
    """A node of two cards, 4 places on the first, with this machine's processes and a fake MPS."""

    def __init__(self, root: Path, **keys: str) -> None:
        own = {"PROC_ROOT": "/proc", "SHARES": "0:4", "SHARE_MPS": "yes", "MPS_DIR": f"{root}/m"}
        super().__init__(root, 2, **{**own, **keys})
        self.mps = FakeMps(root / "bin", self.dev / "nvidia0")
        self.settings["MPS_CONTROL"] = str(self.mps.program)
        self.lock.mkdir()
        self.inventory(f"gpu.{bus(0)}.memory_mib=8000", boot_id=self.node().boot_id)
        self.journal = HeardJournal()
        self.keeper = MpsKeeper(self.journal)
        self.jobs: list[subprocess.Popen[bytes]] = []

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
        released = release_locks(node, lambda o: o.token == token, judge_of(node), soon(), "end")
        assert released.kept == []

    def site(self) -> MpsSite:
        """Return how gpulockd sees the first card's MPS."""
        return next(iter(self.keeper.cards.values())).site

    def ready(self, grant: Grant) -> None:
        """Let gpulockd start MPS, for which the job waits."""
        self.wait_for((Path(self.lock) / "locks" / grant.owner.devices[0] / "mps").exists)
        wait_for_mps(self.node(), grant.owner, Deadline(0.0))

    def gone(self) -> bool:
        """Return whether the card has no MPS any more."""
        return not folder.list_card_folders(self.settings["MPS_DIR"])


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    one = Desk(tmp_path)
    yield one
    for card in list(one.keeper.cards.values()):
        for seconds in processes.kill_by_pipes(card.site):
            select.select([], [], [], seconds)
        while processes.kill_mps_processes(card.site):
            select.select([], [], [], 0.01)
    for job in one.jobs:
        job.kill()
        job.wait()


def test_mps_comes_with_the_first_share_and_goes_with_the_last(desk: Desk) -> None:
    first = desk.claim(desk.start().pid)
    desk.ready(first)
    running = list_mps_processes(desk.site())
    assert len(running) == 2, "the daemon and its server"
    second = desk.claim(desk.start().pid)
    desk.ready(second)
    desk.end(first)
    desk.round()
    assert list_mps_processes(desk.site()) == running
    desk.end(second)
    assert desk.locks() == [], "MPS has the card open, and keeps no place"
    site = desk.site()
    desk.wait_for(desk.gone)
    assert list_mps_processes(site) == {}
    assert [line.partition(" started")[0] for line in desk.journal.said()] == [
        f"<5>MPS of {bus(0)}",
        f"<5>MPS of {bus(0)} ended",
    ]


def test_the_job_gets_the_pipes_and_the_limits_of_its_place(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid, 3)
    told = dict(environment.grant_variables(grant.devices, desk.node().settings))
    assert told["CUDA_VISIBLE_DEVICES"] == grant.devices[0].uuid
    assert told["CUDA_MPS_PIPE_DIRECTORY"].startswith(desk.settings["MPS_DIR"])
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
        node.store.read_details(lock)
    tree = ProcessTree(node.proc)
    for pid in list_mps_processes(desk.site()):
        assert classify_process(pid, locks, tree, ()) == OWNERS
    assert classify_process(other.pid, locks, tree, ()) == FOREIGN


@pytest.mark.parametrize("fault", ["deaf", "deaf-server", "leaves-pipes"])
def test_mps_that_does_not_quit_is_killed_and_its_pipes_are_removed(
    desk: Desk, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.mps.fault(fault)
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    monkeypatch.setattr(processes, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(keeper, "QUIT_SECONDS", 0.3)
    site = desk.site()
    desk.end(grant)
    desk.wait_for(desk.gone)
    assert list_mps_processes(site) == {}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("fails", "-d ended with 1: An instance of this daemon is already running"),
        ("no-server", "it has no server: Server exited with status 1"),
        ("never-ready", "-d does not go into the background"),
    ],
)
def test_a_job_is_refused_with_the_reason_when_mps_does_not_start(
    desk: Desk, fault: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one that is never ready, or has no server, is waited for so long
    monkeypatch.setattr(processes, "START_SECONDS", 1.0 if fault == "never-ready" else 5.0)
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
    desk.keeper.failed.clear()  # ten seconds later
    monkeypatch.setattr(processes, "START_SECONDS", PATIENCE)
    desk.ready(desk.claim(desk.start().pid))


@pytest.mark.another_user
def test_that_one_users_mps_failed_is_no_other_users_refusal(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for above in (tmp_path, *tmp_path.parents):
        if not above.stat().st_mode & stat.S_IXOTH:
            above.chmod(0o755)
    (desk.dev / "nvidia0").chmod(0o666)
    first = desk.claim(desk.start(pwd.getpwnam(NOBODY).pw_uid).pid)
    desk.ready(first)
    os.kill(desk.site().control[0], signal.SIGKILL)
    desk.wait_for(lambda: desk.keeper.failed)
    desk.end(first)
    desk.wait_for(desk.gone)
    desk.ready(desk.claim(desk.start().pid))


def test_no_test_of_a_gpu_begins_while_an_mps_ends_on_it(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    desk.end(grant)
    card = next(d for d in desk.node().devices() if d.bus == bus(0))
    with pytest.raises(CardTakenError, match="an MPS ends"):
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


def test_a_restarted_gpulockd_takes_the_daemon_over_and_ends_it_with_the_last_share(
    desk: Desk,
) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    site = desk.site()
    running = list_mps_processes(site)
    desk.keeper = MpsKeeper(desk.journal)
    desk.round()
    assert desk.site().control == site.control
    assert list_mps_processes(site) == running
    desk.end(grant)
    desk.keeper = MpsKeeper(desk.journal)
    desk.wait_for(desk.gone)
    assert list_mps_processes(site) == {}


def test_what_a_killed_daemon_leaves_is_ended_and_mps_starts_anew(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    site = desk.site()
    before = list_mps_processes(site)
    os.kill(site.control[0], signal.SIGKILL)
    desk.wait_for(lambda: not set(before) & set(list_mps_processes(site)))
    desk.wait_for(desk.gone)
    desk.keeper.failed.clear()
    desk.wait_for(lambda: desk.keeper.cards and desk.site().runs())


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


def test_places_of_one_claim_are_on_one_card(desk: Desk) -> None:
    desk.settings["SHARES"] = "0:4 1:2"
    refusal = desk.refused(desk.start().pid, 5)
    assert refusal.kind == INVALID_REQUEST
    assert "MPS serves one card: at most 4" in refusal.why
    desk.claim(desk.start().pid, 3)
    assert (
        len({name.partition(".s")[0] for name in desk.claim(desk.start().pid, 2).owner.devices})
        == 1
    )


def test_a_folder_that_a_user_made_first_closes_no_card(desk: Desk, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    shm.chmod(0o1777)
    desk.settings["MPS_DIR"] = f"{shm}/mps"
    (shm / "mps").mkdir()
    (shm / "mps").chmod(0o777)
    card = shm / "mps" / bus(0).replace(":", "-")
    card.mkdir()
    assert bus(0) in desk.claim(desk.start().pid, 2, share=False).owner.devices


def test_no_mps_is_started_below_a_folder_where_users_may_write(desk: Desk, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    shm.chmod(0o1777)
    desk.settings["MPS_DIR"] = f"{shm}/mps"
    grant = desk.claim(desk.start().pid)
    with pytest.raises(Refusal, match=f"others than root may write to {shm}"):
        desk.ready(grant)
    assert list(shm.iterdir()) == []


def test_gpulockd_makes_the_folder_at_its_start_for_containers_that_bind_it(desk: Desk) -> None:
    desk.round()
    info = Path(desk.settings["MPS_DIR"]).stat()
    assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (os.geteuid(), 0o755)


def test_the_default_folder_is_not_where_users_or_logind_have_a_say() -> None:
    shared = ("/dev/shm/", "/tmp/", "/var/tmp/", "/run/")  # no user may fill /run, with the locks
    assert not Settings({}).mps_dir.startswith(shared)


# --- what a user lets look like MPS ---------------------------------------------------------------


class Lookalikes:
    """Processes with the name of a program of MPS and a card's pipes, in no job."""

    def __init__(self, root: Path) -> None:
        self.program = root / "nvidia-cuda-mps-x"
        shutil.copy("/bin/sleep", self.program)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, pipes: str) -> int:
        environ = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "PATH": os.environ["PATH"]}
        one = subprocess.Popen([self.program, "1000"], env=environ, start_new_session=True)
        self.started.append(one)
        return one.pid


@pytest.fixture
def lookalikes(tmp_path: Path) -> Iterator[Lookalikes]:
    some = Lookalikes(tmp_path)
    yield some
    for one in some.started:
        try:
            os.killpg(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        one.wait()


def test_what_looks_like_mps_and_has_no_card_open_keeps_no_card_closed(
    desk: Desk, lookalikes: Lookalikes, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    lookalikes.start(desk.site().pipes)
    monkeypatch.setattr(processes, "kill_process", print)  # a loop starts the next one
    desk.end(grant)
    desk.wait_for(desk.gone)
    assert lookalikes.started[0].poll() is None


def test_gpulockds_main_thread_reads_no_memory_of_what_looks_like_mps(
    desk: Desk, lookalikes: Lookalikes, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    watched, threads = lookalikes.start(desk.site().pipes), list[int]()
    real = Proc.read_memory

    def read(self: Proc, pid: int, name: str) -> bytes:
        threads.extend([_thread.get_ident()] if pid == watched else [])
        return real(self, pid, name)

    monkeypatch.setattr(Proc, "read_memory", read)
    os.kill(desk.site().control[0], signal.SIGKILL)  # what is left of it is looked for
    desk.keeper = MpsKeeper(desk.journal)
    desk.wait_for(desk.gone)
    desk.end(grant)
    assert threads
    assert _thread.get_ident() not in threads


def test_a_look_at_what_looks_like_mps_ends_at_the_first_that_hangs(
    desk: Desk, lookalikes: Lookalikes, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = MpsSite(desk.node(), desk.node().devices()[0], os.geteuid())
    pids = [lookalikes.start(site.pipes) for _ in range(3)]
    asked: list[int] = []

    def read(_self: Proc, pid: int, _name: str) -> bytes:
        asked.append(pid)
        raise TimeoutError

    monkeypatch.setattr(Proc, "read_memory", read)
    desk.wait_for(lambda: all(Path(f"/proc/{p}/comm").read_text() != "python" for p in pids))
    with pytest.raises(TimeoutError):
        list(processes.walk_by_pipes(site, Proc("/proc"), pids))
    assert len(asked) == 1


def test_a_daemon_that_a_killed_gpulockd_had_not_noted_is_ended(desk: Desk) -> None:
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    site = desk.site()
    running = list_mps_processes(site)
    folder.write_server_note(site.folder, site.uid, site.node.boot_id)
    desk.keeper = MpsKeeper(desk.journal)
    desk.wait_for(desk.gone)
    assert not any(site.node.proc.running(*process) for process in running.items())


def test_removal_follows_no_link_of_the_user(desk: Desk, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    grant = desk.claim(desk.start().pid)
    desk.ready(grant)
    pipes = Path(desk.site().pipes)
    (pipes / "link").symlink_to(precious)
    desk.end(grant)
    desk.wait_for(desk.gone)
    desk.wait_for(lambda: not any(tmp_path.glob("m/.gone.*")))
    assert (precious / "file").exists()


@pytest.mark.another_user
def test_mps_runs_as_the_cards_user_in_folders_that_are_the_users_alone(
    desk: Desk, tmp_path: Path
) -> None:
    for above in (tmp_path, *tmp_path.parents):
        if not above.stat().st_mode & stat.S_IXOTH:
            above.chmod(0o755)
    (desk.dev / "nvidia0").chmod(0o666)
    user = pwd.getpwnam(NOBODY)
    grant = desk.claim(desk.start(user.pw_uid).pid)
    desk.ready(grant)
    pids = list_mps_processes(desk.site())
    assert len(pids) == 2
    for pid in pids:
        status = desk.node().proc.status(pid)
        assert status.uids == (user.pw_uid,) * 4
        assert 0 not in status.groups or 0 in os.getgrouplist(NOBODY, user.pw_gid)
    home = Path(desk.site().folder)
    assert (home.stat().st_uid, stat.S_IMODE(home.stat().st_mode)) == (0, 0o755)
    for name in ("pipe", "log"):
        info = (home / name).stat()
        assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (user.pw_uid, 0o700)
    assert desk.refused(desk.start().pid).kind == BUSY, "the card is nobody's"
    desk.end(grant)
    desk.wait_for(desk.gone)
