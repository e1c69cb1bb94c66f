# SPDX-License-Identifier: Apache-2.0
"""The gate: one at a time, never the wrong file, and nobody waits for ever."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.store.gate import GATE, Gate
from gpulock.store.locks import LockStore

HOLDER = """
import sys
sys.path[:0] = [sys.argv[1]]
from gpulock.deadline import Deadline
from gpulock.store.gate import Gate
with Gate(sys.argv[2], Deadline(5)):
    print("in", flush=True)
    sys.stdin.readline()
print("out", flush=True)
sys.stdin.readline()
"""
CHECKOUT = str(Path(__file__).resolve().parents[3])


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the gate until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", HOLDER, CHECKOUT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        yield process
        process.kill()


def enter(folder: Path, seconds: float = 0.05) -> float:
    with Gate(str(folder), Deadline(seconds)) as gate:
        return gate.waited


def refusal(folder: Path) -> Refusal:
    with pytest.raises(Refusal) as caught:
        enter(folder)
    return caught.value


def test_two_processes_exclude_each_other(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert refusal(tmp_path).kind == UNKNOWN
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "out\n"
    assert enter(tmp_path) < 0.05


def test_a_stopped_holder_is_refused_at_the_deadline(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.send_signal(signal.SIGSTOP)
    found = refusal(tmp_path)
    assert (found.kind, GATE in found.why) == (UNKNOWN, True)


def test_a_caller_delayed_past_its_deadline_still_gets_a_free_gate(
    tmp_path: Path,
) -> None:
    holder = Gate(str(tmp_path), Deadline(1))

    class Suspended(Deadline):
        """A deadline that passes while the machine sleeps, and the holder is over by then."""

        asked = 0

        def left(self) -> float:
            self.asked += 1
            if self.asked == 1:
                return 5.0
            holder.__exit__()
            return 0.0

    holder.__enter__()
    with Gate(str(tmp_path), Suspended(5)) as gate:
        assert gate.waited >= 0


def test_a_killed_holder_lets_go(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    enter(tmp_path)


def test_two_gates_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    with Gate(str(tmp_path), Deadline(1)):
        assert refusal(tmp_path).kind == UNKNOWN
    enter(tmp_path, 0)  # a gate without time left is still tried once


def mode(number: int) -> Callable[[Path], object]:
    def make(gate: Path) -> None:
        gate.touch()
        gate.chmod(number)

    return make


@pytest.mark.parametrize(
    "make",
    [
        *(mode(0o644), mode(0o620), mode(0o602), mode(0o660)),
        lambda gate: gate.symlink_to("target"),
        lambda gate: os.mkfifo(gate, 0o600),
        lambda gate: gate.mkdir(0o700),
    ],
)
def test_what_others_may_open_and_what_is_no_file_is_no_gate_and_not_followed(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / GATE)
    assert refusal(tmp_path).kind == BROKEN
    assert not (tmp_path / "target").exists()


def test_a_gate_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert refusal(tmp_path).kind == BROKEN


def test_a_folder_that_is_not_there_any_more_breaks_no_node(tmp_path: Path) -> None:
    """Root removes LOCK_DIR while jobs start: one prolog in a hundred found its folder gone."""
    assert refusal(tmp_path / "gone").kind == UNKNOWN


def test_a_file_that_was_replaced_before_it_was_locked_is_not_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer holds the new file: who has the old one locked must not be let in."""
    gate = tmp_path / GATE
    peers: list[int] = []
    real = fcntl.flock

    def replaced(fd: int, how: int) -> None:
        if not peers:
            gate.unlink()
            peers.append(os.open(gate, os.O_RDWR | os.O_CREAT, 0o600))
            real(peers[0], fcntl.LOCK_EX)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    try:
        assert refusal(tmp_path).kind == UNKNOWN
    finally:
        os.close(peers[0])
    enter(tmp_path)


def test_a_child_that_has_the_gate_open_keeps_it_from_nobody(tmp_path: Path) -> None:
    """A process that was forked under the gate has its descriptor until it calls exec."""
    with Gate(str(tmp_path), Deadline(1)) as gate:
        copy = os.dup(gate._fd)
    try:
        enter(tmp_path)
    finally:
        os.close(copy)


def test_who_leaves_a_gate_that_was_replaced_is_told(store: LockStore) -> None:
    with pytest.raises(Refusal, match="was replaced meanwhile"), Gate(store, Deadline(1)):
        Path(store.root, GATE).unlink()


def test_a_gate_that_stays_shut_or_is_not_ours_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with Gate(str(tmp_path), Deadline(1)):
        before = {*os.listdir("/proc/self/fd")}
        refusal(tmp_path)
    (tmp_path / GATE).chmod(0o644)
    refusal(tmp_path)
    assert {*os.listdir("/proc/self/fd")} <= before


def test_a_file_removed_after_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / GATE
    real = fcntl.flock
    removed: list[int] = []

    def remove_once(fd: int, how: int) -> None:
        real(fd, how)
        if not removed:
            removed.append(gate.stat().st_ino)
            gate.unlink()

    monkeypatch.setattr(fcntl, "flock", remove_once)
    with Gate(str(tmp_path), Deadline(1)):
        assert gate.exists()


def test_a_lock_file_that_cannot_be_opened_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()

    with pytest.raises(Refusal) as refused, Gate(str(tmp_path), Deadline(1), name="lock"):
        pytest.fail("a folder is no lock")

    assert refused.value.why == f"{tmp_path}/lock cannot be opened: Is a directory"
    assert refused.value.do == f"look at {tmp_path}"


def test_a_lock_that_the_kernel_cannot_give_is_a_refusal_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(Refusal, match="cannot be locked: No locks available"):
        Gate(str(tmp_path), Deadline(5)).__enter__()


def test_a_gate_that_cannot_be_unlocked_or_closed_is_left(tmp_path: Path) -> None:
    """Else a claim that is made would be refused, and keep its devices: the sweep saw it."""
    with Gate(str(tmp_path), Deadline(1)) as gate:
        os.close(gate._fd)
    enter(tmp_path)
