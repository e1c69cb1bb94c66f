# SPDX-License-Identifier: Apache-2.0
"""HEALTH_COMMAND on free cards: real processes, and claims that take the card back."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulock.alloc import checks
from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.liveness import Judge
from gpulock.daemon.health import checker, health_command
from gpulock.daemon.health.cards import COMMAND, CardState
from gpulock.daemon.health.checker import AGAIN, PAUSE
from gpulock.daemon.health.health_command import ENDING, SET_RIGHTS, TEST_SECONDS, WAIT
from gpulock.daemon.history.pending import find_ended_claims
from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.errors import BUSY, LockTimeout, Refusal
from gpulock.sge.sensor import compute_sensor_values, read_sensor_rows
from gpulock.store import quarantine
from gpulock.store.gate import Gate
from gpulock.store.grants import release_devices
from gpulock.store.owner import ENDING_COMMENT, Owner
from gpulock.store.quarantine import QUARANTINE
from gpulock.workstation.process_claims import make_process_owner
from gpulock.workstation.waiting import WaitingCaller, encode_waiting, write_waiting
from tests.support.faults import disk_full
from tests.support.health_site import Ward
from tests.support.locks import place_lock
from tests.support.scripts import write_script
from tests.support.trees import BOOT, bus, judge_of, let_others_in, soon
from tests.support.wait import wait_until

MUCH = "yes | head -c 3000000"
PATIENCE = 40.0  # seconds until a test gives up what a loaded machine may take
WAITS = 'echo "$GPULOCK_DEVICE" >"$0.began"; read -r line <"$0.fifo"\n'

pytestmark = pytest.mark.another_user


class Clinic(Ward):
    """A node with cards of its own and this machine's processes; `script` is HEALTH_COMMAND."""

    def __init__(self, root: Path, script: str, gpus: int = 2, **keys: str) -> None:
        self.program = root / "check"
        own = {"PROC_ROOT": "/proc", "QUARANTINE_ON": "", "HEALTH_COMMAND": str(self.program)}
        super().__init__(root, gpus, **{**own, **keys})
        self.write(script)
        self.boot = self.node().boot_id

    def write(self, script: str) -> None:
        """Let HEALTH_COMMAND do this; what it writes it may write."""
        write_script(self.program, script)
        for name in ("check.began", "check.said"):
            path = self.root / name
            path.touch()
            path.chmod(0o666)
        fifo = self.root / "check.fifo"
        if not fifo.exists():
            os.mkfifo(fifo)
            fifo.chmod(0o666)

    def reconcile(self) -> ReconcileReport:
        node = self.node()
        return reconcile_locks(node, judge_of(node), soon())

    def go_round(self) -> None:
        """Let gpulockd go round once."""
        report = self.reconcile()
        for chore in self.chores():
            chore.run(self.node(), report, self.now)

    def wait_for(self, done: Callable[[], bool], act: Callable[[], object] = int) -> None:
        """Wait until something is so, and act meanwhile."""

        def so() -> bool:
            if done():
                return True
            act()
            return False

        wait_until(so, why=lambda: str(self.said()))

    def start_check(self) -> int:
        """Let gpulockd begin to test a card; return the pid once the program runs."""
        self.go_round()
        assert self.checker.command is not None, self.said()
        began = self.root / "check.began"
        self.wait_for(lambda: bool(began.read_text()))
        return self.checker.command.pid

    def test(self) -> None:
        """Let a card be tested, and wait for its outcome."""
        self.go_round()
        self.finish_check()

    def finish_check(self) -> None:
        """Wait until the command is over and its outcome known, as rounds see it."""
        self.wait_for(lambda: self.checker.command is None, self.go_round_without_next)

    def go_round_without_next(self) -> None:
        self.reconcile()
        self.checker.run_due(self.now)

    def outcome(self, number: int) -> CardState:
        return self.cards().of(bus(number))

    def is_tested(self, number: int) -> bool:
        """Return whether the last test of a card had an outcome."""
        return COMMAND in self.outcome(number).checks

    def claim(
        self,
        count: int,
        wanted: tuple[str, ...] = (),
        patience: float = PATIENCE,
        judge: Callable[[], Judge] | None = None,
    ) -> list[str]:
        """Let this process claim; gpulockd goes on while it waits."""
        node = self.node()
        own = make_process_owner(node, os.getpid(), "root")
        want = ClaimRequest(count, wanted)
        want.patience = patience
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks, "time", SimpleNamespace(sleep=self.pass_time, time=time.time))
            grant = claim_devices(node, own, want, judge or (lambda: judge_of(node)), soon())
        return [device.id for device in grant.devices]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Let a card be tested; what is done meanwhile ends no test."""
        pid = self.start_check()
        yield
        proc = self.node().proc
        assert proc.running(pid, proc.start(pid))

    def pass_time(self, seconds: float) -> None:
        """Let a claim wait: gpulockd looks after the command that runs."""
        select.poll().poll(1000 * seconds)
        self.checker.run_due(self.now)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Clinic]]:
    let_others_in(tmp_path)  # the program runs as nobody
    made: list[Clinic] = []

    def clinic(script: str, gpus: int = 2, **keys: str) -> Clinic:
        made.append(Clinic(tmp_path, script, gpus, **keys))
        return made[-1]

    yield clinic
    for one in made:
        one.checker.close()


def test_a_free_card_is_tested_without_rights_and_the_outcome_is_kept(
    make: Callable[..., Clinic],
) -> None:
    site = make('id -un >"$0.said"; echo "$GPULOCK_DEVICE $CUDA_VISIBLE_DEVICES" >>"$0.said"\n', 1)
    since = site.now
    site.now += 1
    site.go_round()
    assert site.locks() == [bus(0)]
    begun, site.now = site.now, site.now + 1
    site.finish_check()
    site.go_round_without_next()
    assert site.outcome(0).checks["command"] == ""
    assert site.outcome(0).tested == pytest.approx(begun, abs=0.001), "what came since counts"
    assert site.locks() == []
    assert (site.root / "check.said").read_text().split() == ["nobody", bus(0), "GPU-00000000-aaaa"]
    site.tell(0)
    site.sample()
    site.now += 1
    site.go_round()
    assert site.outcome(0).has_passed(since)
    assert site.checker.command is None, "it is tested once in a boot"


# Ends that tell nothing of a card: the OOM killer's, of the program or of what it runs; a limit's;
# of a program that cannot be run.
KILLED, KILLED_CHILD = "kill -KILL $$\n", "sh -c 'kill -KILL $$'; exit $?\n"
LIMITED, NO_PROGRAM = "kill -XCPU $$\n", "/nonexistent/memtest\n"


def end_without_outcome(site: Clinic) -> None:
    """Let one test begin, and be ended by something else than a claim."""
    site.go_round()
    assert site.checker.command is not None, site.said()
    site.wait_for(lambda: site.checker.command is None, site.go_round)


def test_a_card_that_fails_is_told_with_what_the_command_said_last_and_tested_again_later(
    make: Callable[..., Clinic],
) -> None:
    site = make(f'{MUCH} || exit 1; echo "memory test: bad"; exit 3\n', 1)
    site.test()
    why = "HEALTH_COMMAND: it ended with 3: memory test: bad"
    one = site.outcome(0)
    assert one.failed() == {"command": why}
    site.go_round()
    assert site.checker.command is None
    assert site.said() == [f"<4>{bus(0)}: {why}"]
    site.write(KILLED)
    site.now += AGAIN + 1
    end_without_outcome(site)
    assert one.failed() == site.outcome(0).failed(), "what told nothing changes nothing"
    site.write(f"set -e; {MUCH} | cat; echo good >&2\n")
    site.now += AGAIN + 1
    site.test()
    assert site.said()[-1] == f"<5>{bus(0)} passed HEALTH_COMMAND"


def test_a_test_whose_outcome_cannot_be_noted_is_not_run_again_at_once(
    make: Callable[..., Clinic], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make("", 1)
    with monkeypatch.context() as broken:
        broken.setattr(checker, "save_changed_cards", disk_full)
        with pytest.raises(OSError, match="No space left"):
            site.test()
    site.go_round()
    assert site.checker.command is None
    site.now += AGAIN
    site.test()
    assert site.is_tested(0)


def test_what_a_test_leaves_behind_is_ended_and_only_then_is_the_card_free(
    make: Callable[..., Clinic], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make("sleep 1000 >/dev/null 2>&1 &\n", 1)
    site.go_round()
    with monkeypatch.context() as patch:
        looked = list[str]()

        def runs(_: object, token: str) -> bool:
            looked.append(token)
            if len(looked) == 1:
                raise LockTimeout("the gate")
            return False

        patch.setattr(health_command, "release_check", runs)
        site.wait_for(lambda: len(looked) == 3, lambda: site.checker.run_due(site.now))
    assert site.checker.command is not None
    assert not site.is_tested(0)
    site.finish_check()
    assert site.is_tested(0)
    assert site.locks() == []


def test_a_claim_takes_the_card_back_from_a_running_test(make: Callable[..., Clinic]) -> None:
    site = make(f"sleep 1000 & {WAITS}", 1)
    pid = site.start_check()
    assert site.claim(1) == [bus(0)]
    (lock,) = site.node().store.read_all_locks().values()
    assert lock.owner is not None
    assert not lock.owner.is_health_check()
    assert site.checker.command is None
    assert not site.is_tested(0), "a test that gave way says nothing"
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    site.go_round()
    assert site.checker.command is None, "a job has the card"
    assert site.outcome(0).tested is None, "it is tested when it is free again"
    release_devices(site.node().store, lock.owner.token, [lock.id], "", BOOT)
    site.now += PAUSE
    site.start_check()


@pytest.mark.parametrize(("count", "wanted"), [(2, ()), (1, (bus(1),)), (1, (bus(2),))])
def test_a_claim_that_can_have_other_cards_disturbs_no_test(
    make: Callable[..., Clinic], count: int, wanted: tuple[str, ...]
) -> None:
    site = make(WAITS, 3)
    with site.undisturbed():
        assert site.claim(count, wanted) == list(wanted or (bus(1), bus(2)))


def test_a_claim_that_gets_nothing_disturbs_no_test(make: Callable[..., Clinic]) -> None:
    site = make(WAITS, 3)
    with site.undisturbed(), pytest.raises(Refusal) as busy:
        node = site.node()
        other = make_process_owner(node, 1, "root").copy(devices=(bus(2),), token="x")
        place_lock(node.store, bus(2), other)
        site.claim(3)
    assert busy.value.kind == BUSY
    assert site.claim(2) == [bus(0), bus(1)]
    assert site.checker.command is None


@pytest.mark.parametrize("wanted", [(), (bus(0),)])
@pytest.mark.parametrize("lost", [False, True])
def test_a_claim_disturbs_no_test_of_a_card_that_is_out_of_service(
    make: Callable[..., Clinic], wanted: tuple[str, ...], *, lost: bool
) -> None:
    site = make(WAITS, 2)
    site.reconcile()
    quarantine.write_device_note(str(site.state), QUARANTINE, bus(0), "gpulock", "xid: XID 79")
    with site.undisturbed(), pytest.raises(Refusal):
        if lost:
            (site.lock / "lost").touch()
        site.claim(len(wanted) or 2, wanted)


def test_a_test_that_takes_too_long_is_ended_with_all_that_it_started(
    make: Callable[..., Clinic],
) -> None:
    site = make(f"sleep 1000 & {WAITS}", 1)
    pid = site.start_check()
    site.now += TEST_SECONDS + 1
    site.finish_check()
    one = site.outcome(0)
    assert one.failed() == {"command": "HEALTH_COMMAND: it took longer than 1800 s"}
    site.wait_for(lambda: not judge_of(site.node()).scan.session_members(pid))


def survive(*_: object) -> None:
    """Do what SIGKILL does to a process that hangs in the driver: nothing."""


def test_a_test_that_cannot_be_ended_is_told_and_the_next_card_is_tested(
    make: Callable[..., Clinic], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make(WAITS, 2, QUARANTINE_ON="health")
    why = "HEALTH_COMMAND: it took longer than 1800 s, and cannot be ended"
    site.start_check()
    command = site.checker.command
    assert command is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", survive)
        for seconds in (TEST_SECONDS + 1, ENDING, 1):
            site.now += seconds
            for card in range(2):
                site.tell(card)
            site.sample()
            site.go_round()
        assert site.outcome(0).failed() == {"command": why}
        assert site.said()[0] == f"<4>{bus(0)}: {why}"
        site.go_round()
        assert site.reason(0) == f"health: {why}"
        assert site.checker.command is not None
        assert site.checker.command.bus == bus(1)
        assert site.locks() == [bus(0), bus(1)], "nobody gets what such a process may use"
    site.checker.close()
    site.start()
    site.write("exit 0\n")
    site.wait_for(lambda: site.locks() == [bus(0)], site.go_round)
    assert site.outcome(0).failed(), "another gpulockd leaves it alone, too"
    command.close()
    site.wait_for(lambda: site.locks() == [], site.go_round)


def test_a_claim_takes_no_card_whose_test_cannot_be_ended_and_no_later_one_waits_for_it(
    make: Callable[..., Clinic], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make(WAITS, 1)
    node, pid = site.node(), site.start_check()
    waits = list[int]()

    def wait(seconds: float) -> None:
        with Gate(node.store, soon()):
            waits.append(1)
        select.poll().poll(1000 * seconds)
        site.checker.run_due(site.now)

    monkeypatch.setattr(site, "pass_time", wait)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", survive)
        for waited in (True, False):
            waits.clear()
            with pytest.raises(Refusal) as busy:
                site.claim(1, patience=0.1)
            assert busy.value.kind == BUSY
            assert bool(waits) == waited, "one waits, and not while it holds the gate"
    assert site.locks() == [bus(0)]
    assert compute_sensor_values(read_sensor_rows(node), node.settings)["gpu"] == 0
    os.kill(pid, signal.SIGKILL)
    site.wait_for(lambda: site.checker.command is None, lambda: site.checker.run_due(site.now))
    assert site.claim(1) == [bus(0)]
    assert not site.is_tested(0), "a claim ended it, and that says nothing"


def test_of_a_gpulockd_that_is_gone_a_claim_takes_the_card_itself(
    make: Callable[..., Clinic], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make(WAITS, 1)
    pid = site.start_check()
    command, site.checker.command = site.checker.command, None

    def die(seconds: float) -> None:
        os.kill(pid, signal.SIGKILL)
        select.poll().poll(1000 * seconds)

    monkeypatch.setattr(site, "pass_time", die)
    assert site.claim(1, patience=0.5) == [bus(0)]
    assert command is not None
    command.close()


@pytest.mark.parametrize("script", [KILLED, KILLED_CHILD, LIMITED, NO_PROGRAM])
def test_a_test_that_something_else_ends_tells_nothing_and_is_tried_again_later(
    make: Callable[..., Clinic], script: str
) -> None:
    site = make(script, 1)
    end_without_outcome(site)
    assert not site.is_tested(0)
    assert not site.outcome(0).has_passed(-1.0)
    (line,) = site.said()
    assert line.startswith(f"<4>{bus(0)}: HEALTH_COMMAND told nothing: ")
    site.now += AGAIN - 1
    site.go_round()
    assert site.checker.command is None, "it is not tried again at once"
    site.now += 2
    site.write("exit 0\n")
    site.test()
    assert site.outcome(0).has_passed(-1.0)


@pytest.mark.real_time
def test_the_program_ends_with_gpulockd(make: Callable[..., Clinic], tmp_path: Path) -> None:
    site = make(WAITS, 1)
    script = (
        "import subprocess, sys\n"
        f"words = {[*SET_RIGHTS, *WAIT, str(site.program)]!r}\n"
        "child = subprocess.Popen(words, stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "child.stdin.write(b'go\\n'); child.stdin.flush()\n"
        "sys.stdin.read()\n"
    )
    words = ["/usr/bin/python3", "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        fd = os.pidfd_open(pid)
        began = tmp_path / "check.began"
        site.wait_for(lambda: bool(began.read_text()))
        daemon.kill()
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    wait_until(lambda: waiting.poll(0), why="the test to end with gpulockd")
    os.close(fd)


def test_no_test_begins_while_somebody_waits_for_a_card(make: Callable[..., Clinic]) -> None:
    site = make("exit 0\n", 1)
    node, me = site.node(), os.getpid()
    reconcile_locks(node, judge_of(node), soon())
    caller = WaitingCaller(1, me, node.proc.start(me), 1000, 0.0, "alice", "1 GPU", "")
    write_waiting(node.store.path, encode_waiting([caller], node.boot_id))
    site.go_round()
    assert site.checker.command is None


def test_a_card_that_the_policy_put_out_is_tested_first_and_an_administrators_not(
    make: Callable[..., Clinic],
) -> None:
    site = make(WAITS, 3)
    state = str(site.state)
    site.reconcile()
    quarantine.write_device_note(state, QUARANTINE, bus(0), "root", "its fan died")
    quarantine.write_device_note(state, QUARANTINE, bus(2), "gpulock", "xid: XID 79")
    site.start_check()
    assert site.locks() == [bus(2)]


def test_a_card_that_was_started_again_while_it_is_out_is_tested_once_more(
    make: Callable[..., Clinic], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make("exit 0\n", 1)
    site.reconcile()
    before = time.time() - 1000
    with monkeypatch.context() as patch:
        patch.setattr(quarantine, "time", SimpleNamespace(time=lambda: before))
        quarantine.write_device_note(str(site.state), QUARANTINE, bus(0), "gpulock", "xid: XID 79")
    site.test()
    site.go_round()
    assert site.checker.command is None, "it has passed"
    site.now += 10
    cards = site.cards()
    cards.loaded = site.now
    site.save(cards)
    site.now += 1
    site.go_round()
    assert site.checker.command is not None


def test_a_program_that_is_not_roots_alone_is_not_run(make: Callable[..., Clinic]) -> None:
    site = make("exit 0\n", 1)
    site.program.chmod(0o777)
    site.go_round()
    assert site.checker.command is None
    assert "is not run" in site.said()[0]
    assert site.locks() == []


def test_schedulers_count_a_card_under_test_as_free_and_the_history_has_no_line_of_it(
    make: Callable[..., Clinic],
) -> None:
    site = make(WAITS, 2)
    site.start_check()
    node = site.node()
    assert compute_sensor_values(read_sensor_rows(node), node.settings)["gpu"] == 2
    site.claim(2)
    assert os.listdir(node.store.finished_dir)
    assert find_ended_claims(node, (), set(), time.time()) == {}
    assert os.listdir(node.store.finished_dir) == []


def test_only_gpulockds_own_record_is_a_tests() -> None:
    assert Owner(user="gpulockd", comment="health check").gives_way()
    asked = Owner(user="gpulockd", comment=ENDING_COMMENT)
    assert asked.is_health_check()
    assert not asked.gives_way()
    assert not Owner(user="alice", comment="health check").is_health_check()
    assert not Owner(user="gpulockd").is_health_check()
