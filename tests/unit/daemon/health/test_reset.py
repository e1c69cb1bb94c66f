# SPDX-License-Identifier: Apache-2.0
"""A reset of a GPU: by nobody's leave but root's, while nobody has it or a link peer of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.daemon.health import auto_reset, reset
from gpulock.daemon.health.auto_reset import MOST_TRIES, TRY_PAUSE, CardResetter
from gpulock.daemon.health.reset import (
    free_cut_resets,
    free_reset_locks,
    linked_cards,
    reserve_for_reset,
    run_reset,
)
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import clock_boottime
from gpulock.errors import BROKEN, BUSY, Refusal
from gpulock.node.context import Node
from tests.support.fake_mps import leave_mps
from tests.support.health_site import SHEPHERD, Ward
from tests.support.locks import change_record, end_lock
from tests.support.scripts import write_script
from tests.support.trees import bus, judge_of, judging, record, soon
from tests.support.wait import let_work

SECONDS = 60.0  # no test comes near to it
KNOWN = [f"gpu.{bus(number)}.mig=0" for number in range(4)]  # NVML told of each


class Bench(Ward):
    """A node whose GPUs can be reset: 0 and 1 are linked; `nvidia-smi` is a script."""

    def __init__(self, root: Path, **keys: str) -> None:
        self.smi, self.called = root / "nvidia-smi", root / "called"
        super().__init__(root, 4, NVIDIA_SMI=str(self.smi), **keys)
        self.proc.add(os.getpid(), "gpulockd", uids=(0,) * 4)
        self.script(f"ls {self.lock}/locks | tr '\\n' ' ' >> {self.called}")
        for number in range(4):
            self.tell(number)
        self.round()
        self.inventory(*KNOWN, f"link.{bus(0)}.{bus(1)}=2")
        self.resetter = CardResetter(self.journal, lambda: self.now)

    def script(self, text: str) -> None:
        """Let nvidia-smi do this."""
        write_script(self.smi, f'echo "$@" >> {self.called}\n{text}')

    def note_resets_by_its_clock(self, patch: pytest.MonkeyPatch) -> None:
        """Let a reset be noted at the time that the test has, and not at the machine's."""
        note = reset.note_reset
        patch.setattr(reset, "note_reset", lambda node, card, _: note(node, card, self.now + 1))

    def calls(self) -> int:
        """Return how often nvidia-smi was called."""
        text = self.called.read_text() if self.called.exists() else ""
        return text.count("--gpu-reset")

    def daemon(self, rounds: int = 1) -> None:
        """Let gpulockd do rounds, and wait for the end of each reset that it begins."""
        for _ in range(rounds):
            self.round()
            node = self.node()
            self.resetter.run(node, reconcile_locks(node, judge_of(node), soon()), self.now)
            while self.resetter.due < float("inf"):
                self.resetter.run_due(0.0)
                let_work(0.01)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def refused(node: Node, number: int) -> Refusal:
    """Return why a GPU cannot be reset now."""
    with pytest.raises(Refusal) as found:
        reserve_for_reset(node, bus(number), "root")
    return found.value


def test_a_link_peer_is_reserved_while_a_gpu_is_reset(bench: Bench) -> None:
    node = bench.node()
    cards = reserve_for_reset(node, bus(0), "root")
    assert cards == [bus(0), bus(1)]
    assert run_reset(node, bus(0), SECONDS) == ""
    assert bench.called.read_text() == f"--gpu-reset -i {bus(0)}\n{bus(0)} {bus(1)} "
    with pytest.raises(Refusal):
        claim_devices(node, record(token="", devices=()), ClaimRequest(3), judging(node), soon())
    free_reset_locks(node, cards, "root")
    assert bench.locks() == []


def test_an_nvswitch_joins_all_that_are_on_it(bench: Bench) -> None:
    bench.inventory(*KNOWN, *[f"gpu.{bus(number)}.nvswitch=1" for number in (0, 2, 3)])
    node = bench.node()
    assert linked_cards(node, node.devices(), bus(2)) == [bus(0), bus(3)]
    assert linked_cards(node, node.devices(), bus(1)) == []


@pytest.mark.parametrize("told", [(), KNOWN[:3]])
def test_a_gpu_of_which_no_links_are_known_may_be_linked_to_all(
    bench: Bench, told: tuple[str, ...]
) -> None:
    """No exporter told of it in this boot, as where it was lost from the start."""
    bench.inventory(*told)
    bench.proc.add(700, "python", uids=(0,) * 4, fds={3: bench.dev / "nvidia1"})
    found = refused(bench.node(), 3)
    assert found.kind == BUSY
    assert f"process 700 (python) has {bus(1)} open" in found.why
    assert f"the NVLinks of {bus(3)} are not known" in found.why
    bench.proc.remove(700)
    bench.hold(2)
    assert f"the NVLinks of {bus(3)} are not known" in refused(bench.node(), 3).why
    end_lock(bench.node().store, bus(2))
    assert reserve_for_reset(bench.node(), bus(3), "root") == [bus(3), bus(0), bus(1), bus(2)]


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_job_holds_or_is_linked_to_is_not_reset(bench: Bench, number: int) -> None:
    bench.hold(number)
    found = refused(bench.node(), 0)
    assert found.kind == BUSY
    assert f"{bus(number)}" in found.why and "is held by job 12 of alice" in found.why
    assert ("a link peer of" in found.why) is (number == 1)
    assert bench.locks() == [bus(number)]


@pytest.mark.parametrize("name", ["python", "nv-hostengine"])
@pytest.mark.parametrize("number", [0, 1])
def test_what_a_process_has_open_is_not_reset(bench: Bench, number: int, name: str) -> None:
    bench.proc.add(700, name, uids=(0,) * 4, fds={3: bench.dev / f"nvidia{number}"})
    found = refused(bench.node(), 0)
    assert (found.kind, found.why) == (BUSY, f"process 700 ({name}) has {bus(number)} open")
    assert bench.locks() == []


@pytest.mark.parametrize("number", [0, 1])
def test_what_has_an_mps_or_is_linked_to_it_is_not_reset(bench: Bench, number: int) -> None:
    node = bench.node()
    leave_mps(node, bus(number), 1001)
    assert f"{bus(number)} is not free: MPS of uid 1001 ends on it" in refused(node, 0).why
    assert bench.locks() == []


def test_a_card_that_the_driver_does_not_show_wants_a_reboot(bench: Bench) -> None:
    (bench.driver / "gpus" / bus(3)).rename(bench.root / "fell-out")
    assert refused(bench.node(), 3).kind == BROKEN


def test_a_reset_that_fails_is_told_and_proves_nothing(bench: Bench) -> None:
    bench.log_xid(2)
    bench.round()
    bench.script("echo 'GPU 2 is in use'; exit 19")
    assert run_reset(bench.node(), bus(2), SECONDS) == "nvidia-smi ended with 19: GPU 2 is in use"
    bench.tell(2)
    bench.round(9)
    assert bench.out() == [bus(2)]


def test_a_reset_that_does_not_end_is_ended(bench: Bench) -> None:
    bench.script("exec sleep 600")
    assert run_reset(bench.node(), bus(2), 0.2).endswith(" in time")


def test_a_program_that_others_may_write_is_not_run(bench: Bench) -> None:
    bench.smi.chmod(0o777)
    assert "writable by others" in run_reset(bench.node(), bus(2), SECONDS)
    assert bench.calls() == 0


def test_an_exporter_is_paused_for_a_reset_and_resumed_unless_it_was_paused_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[str] = []

    def call(node: Node, act: str) -> None:
        acts.append(act)

    monkeypatch.setattr(reset, "call_exporter", call)
    bench.now = clock_boottime()
    bench.sample()
    assert run_reset(bench.node(), bus(2), SECONDS) == ""
    assert acts == ["pause", "resume"]
    bench.now = clock_boottime()
    bench.sample("fault=paused")
    assert run_reset(bench.node(), bus(2), SECONDS) == ""
    assert acts == ["pause", "resume"]


def test_an_exporter_that_does_not_let_go_keeps_a_gpu_from_a_reset(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.now = clock_boottime()
    bench.sample()
    found = run_reset(bench.node(), bus(2), SECONDS)
    assert found.startswith("the exporter did not pause: ")
    assert bench.calls() == 0


def test_after_a_reset_a_failed_card_comes_back_when_it_is_clean(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.note_resets_by_its_clock(monkeypatch)
    bench.log_xid(2)
    bench.round(5)
    assert bench.out() == [bus(2)]
    assert run_reset(bench.node(), bus(2), SECONDS) == ""
    bench.round(2)
    assert bench.out() == [bus(2)]
    bench.round()
    assert bench.out() == []
    bench.now += 2
    bench.log_xid(2)
    bench.round(9)
    assert bench.out() == [bus(2)], "it wants one more reset"


def test_a_cut_reset_is_freed_when_its_process_is_gone_and_nobody_has_the_gpu_open(
    bench: Bench,
) -> None:
    node = bench.node()
    reserve_for_reset(node, bus(0), "root")
    locks = [*node.store.read_all_locks().values()]
    for lock in locks:
        assert lock.owner
        lock.owner.pid, lock.owner.start = 4711, 1000
        change_record(node.store, lock.id, lock.owner)
    bench.proc.add(4711, "gpulock")
    assert free_cut_resets(node, locks) == []
    bench.proc.remove(4711)
    bench.proc.add(4712, "nvidia-smi", uids=(0,) * 4, fds={3: bench.dev / "nvidia0"})
    assert free_cut_resets(node, locks) == []
    assert bench.locks() == [bus(0), bus(1)]
    bench.proc.remove(4712)
    bench.daemon()
    assert bench.locks() == []


def test_an_administrators_reserve_is_no_reset(bench: Bench) -> None:
    node = bench.node()
    reserve_for_reset(node, bus(3), "root")
    (lock,) = node.store.read_all_locks().values()
    assert lock.owner
    lock.owner.comment = "new cooling"
    lock.owner.pid = 0
    assert free_cut_resets(node, [lock]) == []


# --- by gpulockd ----------------------------------------------------------------------------------


def test_by_default_gpulockd_resets_nothing(bench: Bench) -> None:
    bench.log_xid(2)
    bench.daemon(3)
    assert (bench.out(), bench.calls()) == ([bus(2)], 0)


def test_gpulockd_resets_what_the_policy_took_out_and_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, QUARANTINE_RESET="yes")
    bench.note_resets_by_its_clock(monkeypatch)
    bench.log_xid(0)
    bench.hold(1)
    bench.daemon(2)
    assert bench.calls() == 0, "a job has a link peer of it"
    assert len([line for line in bench.said() if "is not reset yet" in line]) == 1
    bench.proc.remove(SHEPHERD)
    bench.daemon()
    assert (bench.calls(), bench.locks()) == (1, [])
    bench.daemon(3)
    assert bench.out() == []
    assert bench.calls() == 1
    steps = [(one.device, one.step) for one in bench.cards().steps_of(bus(0))]
    assert steps == [(bus(0), "out"), (bus(0), "reset"), (bus(0), "back")]


def test_an_administrators_quarantine_and_what_no_reset_repairs_are_left_alone(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, QUARANTINE_RESET="yes")
    bench.by_hand(0, "xid: its fan died")
    bench.tell(1, f"memory_used={1 << 30}")
    bench.daemon(4)
    assert bench.out() == [bus(0), bus(1)]
    assert bench.calls() == 0


def test_resets_that_fail_are_bounded_and_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path, QUARANTINE_RESET="yes")
    bench.script("exit 1")
    bench.log_xid(2)
    bench.daemon(3)
    assert bench.calls() == 1
    for _ in range(MOST_TRIES + 2):
        bench.now += TRY_PAUSE
        bench.daemon()
    assert bench.calls() == MOST_TRIES
    told = [line for line in bench.said() if "was not reset" in line]
    assert len(told) == MOST_TRIES
    assert "it is not tried again in this boot" in told[-1]
    assert bench.locks() == []


def test_a_gpulockd_that_is_started_again_counts_on_and_keeps_the_pause(tmp_path: Path) -> None:
    bench = Bench(tmp_path, QUARANTINE_RESET="yes")
    bench.script("exit 1")
    bench.log_xid(2)
    bench.daemon(2)
    assert bench.calls() == 1
    for before, after in ((1, 2), (2, MOST_TRIES), (MOST_TRIES, MOST_TRIES)):
        bench.resetter = CardResetter(bench.journal, lambda: bench.now)
        bench.daemon()
        assert bench.calls() == before, "an hour is not over"
        bench.now += TRY_PAUSE
        bench.daemon()
        assert bench.calls() == after
    (last,) = [line for line in bench.said() if f"({MOST_TRIES} of {MOST_TRIES})" in line]
    assert "it is not tried again in this boot" in last


def test_no_reset_is_begun_whose_try_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> tuple[float, ...]:
        raise OSError(errno.ENOSPC, "no space")

    bench = Bench(tmp_path, QUARANTINE_RESET="yes")
    bench.log_xid(2)
    with monkeypatch.context() as patch:
        patch.setattr(auto_reset, "note_reset_try", fail)
        with pytest.raises(OSError, match="no space"):
            bench.daemon(2)
    assert bench.calls() == 0
    bench.daemon()
    assert (bench.calls(), bench.locks()) == (1, [])


def test_a_reset_that_fails_in_gpulockd_itself_is_told_with_its_place_and_frees_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Node, card: str) -> str:
        raise KeyError(card)

    bench = Bench(tmp_path, QUARANTINE_RESET="yes")
    monkeypatch.setattr(reset, "run_reset", fail)
    bench.log_xid(2)
    bench.daemon(2)
    (told,) = [line for line in bench.said() if "was not reset" in line]
    assert "the reset failed: KeyError: '0000:03:00.0' (test_reset.py:" in told
    assert bench.locks() == []


def test_gpulockd_frees_what_it_could_not_free_at_the_end_of_a_reset(bench: Bench) -> None:
    reserve_for_reset(bench.node(), bus(0), "gpulock")
    bench.daemon()
    assert bench.locks() == []


def test_a_process_that_cannot_be_seen_keeps_a_gpu_from_a_reset(bench: Bench) -> None:
    bench.proc.add(700, "python", uids=(os.geteuid(), 1000, 1000, 1000))
    (bench.proc.root / "700/fd").rmdir()
    (bench.proc.root / "700/fd").write_text("no folder")
    found = refused(bench.node(), 2)
    assert (found.kind, "cannot be seen" in found.why) == (BUSY, True)
    assert bench.locks() == []
