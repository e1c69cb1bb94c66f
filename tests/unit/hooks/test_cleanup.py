# SPDX-License-Identifier: Apache-2.0
"""LEFTOVER_PROCESSES: what a job left behind is told or ended, and nobody else is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.job_processes import JobProcesses
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_owner import DAEMONS
from gpulock.alloc.process_scan import ProcessScan
from gpulock.deadline import Deadline
from gpulock.hooks import cleanup
from gpulock.node.context import Node
from gpulock.node.procfs import TICKS
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from tests.support.faults import raising
from tests.support.trees import Box, box_with_shepherd, bus, judging, record, soon

if TYPE_CHECKING:
    from gpulock.alloc.job_processes import JobMembers

GID = 65400
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
HEEDING = STUBBORN.replace("signal.SIG_IGN", "lambda *_: exit(3)")


def judge_with(node: Node, members: JobMembers) -> Judge:
    """Return a judge that knows the processes of Grid Engine's jobs by `members`."""
    return Judge(node.boot_id, ProcessScan(node.proc), {}, {"sge": members})


class Real:
    """Processes of this machine on a simulated node; the job is the caller's."""

    def __init__(self, root: Path, **keys: str) -> None:
        self.box = Box(root, 4, PROC_ROOT="/proc", **keys)
        self.node = self.box.node()
        boot_id = self.node.boot_id
        self.job = record(token="", devices=(), uid=os.geteuid(), add_grp_id=0, boot_id=boot_id)
        want = ClaimRequest(1, share="SHARES" in keys)
        claim_devices(self.node, self.job, want, judging(self.node), soon())
        self.left: dict[int, str] = {}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, code: str) -> subprocess.Popen[str]:
        """Start a process that has said it is ready."""
        words = [sys.executable, "-c", f"{code}\nimport time\ntime.sleep(600)"]
        found = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.started.append(found)
        assert found.stdout is not None
        assert found.stdout.readline() == "\n"
        return found

    def leave(self, code: str = "print(flush=True)") -> subprocess.Popen[str]:
        """Let the job leave a process behind."""
        found = self.start(code)
        self.left[found.pid] = "of the job"
        return found

    def clean(self, ours: str = "12") -> list[str]:
        """Clean as the epilog of a job does."""
        return cleanup.clean_leftovers(
            self.node,
            lambda owner: owner.job_id == ours,
            lambda: judge_with(self.node, self.members),
            Deadline(30),
        )

    def members(self, lock: Lock, scan: ProcessScan, job: JobProcesses) -> None:
        """Add what is left of the job."""
        del lock
        for pid, why in self.left.items():
            if pid in scan.statuses():
                job.add((pid,), why)

    def end(self) -> None:
        """End what is left."""
        for one in self.started:
            one.kill()
            one.communicate()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Real]:
    made = Real(tmp_path, LEFTOVER_PROCESSES="kill")
    yield made
    made.end()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as long as a busy machine needs."""
    for name in ("LEFTOVER_SECONDS", "GRACE"):
        monkeypatch.setattr(cleanup, name, 90.0)


def test_nobody_else_is_touched(real: Real) -> None:
    """And who heeds TERM has the time to end by itself."""
    one, other = real.leave(HEEDING), real.start("print(flush=True)")
    lines = real.clean()
    assert (one.wait(60), other.poll()) == (3, None)
    assert lines == [f"left behind, ended: process {one.pid} (python, of the job)"]


def test_one_that_ignores_term_or_is_stopped_is_killed(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "GRACE", cleanup.PAUSE)
    stubborn, stopped, other = real.leave(STUBBORN), real.leave(), real.leave()
    stopped.send_signal(signal.SIGSTOP)
    assert len(real.clean()) == 1
    assert stubborn.wait(60) == -signal.SIGKILL
    assert (stopped.wait(60) < 0, other.wait(60)) == (True, -signal.SIGTERM)


def test_of_two_places_on_a_card_only_ones_own_processes_are_ended(tmp_path: Path) -> None:
    real = Real(tmp_path, SHARES="0:4", LEFTOVER_PROCESSES="kill")
    opens = f"card = open({str(tmp_path / 'dev/nvidia0')!r}); print(flush=True)"
    one, other = real.leave(opens), real.leave(opens)
    start = real.node.proc.start(other.pid)
    neighbour = real.job.copy(job_id="13", scheduler="process", pid=other.pid, start=start)
    want = ClaimRequest(1, share=True)
    claim_devices(real.node, neighbour, want, judging(real.node), soon())
    assert real.box.locks() == [f"{bus(0)}.share1", f"{bus(0)}.share2"]
    try:
        assert real.clean() == [f"left behind, ended: process {one.pid} (python, of the job)"]
        assert (one.wait(60), other.poll()) == (-signal.SIGTERM, None)
    finally:
        real.end()


def test_the_groups_of_all_tasks_tell_what_is_left(real: Real) -> None:
    (lock,) = real.node.store.read_all_locks().values()
    assert lock.owner is not None
    real.node.store.anchor(lock.owner.token, 600, 2000, GID + 1)
    groups: list[list[int]] = []
    judge = judge_with(real.node, lambda lock, *_: groups.append(lock.groups()))
    cleanup.find_leftovers(real.node, lambda _: True, judge)
    assert groups == [[GID + 1]]


def test_what_another_job_left_is_not_looked_for(real: Real) -> None:
    one = real.leave()
    assert real.clean("13") == []
    assert one.poll() is None


def test_what_does_not_end_is_told_when_the_time_is_up(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process in D state does: signals change nothing."""
    monkeypatch.setattr(cleanup, "LEFTOVER_SECONDS", 0.2)
    one = real.leave()

    def ignored(_: int, __: int) -> None:
        return

    monkeypatch.setattr(cleanup, "pidfd_send_signal", ignored)
    assert real.clean()[-1] == (
        f"left behind, and does not end: process {one.pid} (python, of the job)"
    )
    assert one.poll() is None


def test_where_the_kernel_has_no_pidfd_nothing_is_killed(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "LEFTOVER_SECONDS", 0.2)
    one = real.leave()
    monkeypatch.setattr(os, "pidfd_open", raising(OSError(38, "Function not implemented")))
    assert any("cannot be ended safely" in line for line in real.clean())
    assert one.poll() is None


def test_one_that_cannot_be_read_is_not_taken_for_gone(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    left = cleanup.LeftoverProcess(real.leave().pid, 0, "python", "of the job")
    monkeypatch.setattr(real.node.proc, "running", raising(OSError(errno.EIO, "it fails")))
    monkeypatch.setattr("gpulock.hooks.cleanup.time.sleep", paused.append)
    cleanup.wait_for_leftovers([left], real.node, soon())
    assert paused == [cleanup.PAUSE]


def test_a_pid_that_is_anothers_by_now_gets_no_signal(real: Real) -> None:
    one = real.start("print(flush=True)")
    start = real.node.proc.start(one.pid)
    cleanup.signal_leftovers(
        real.node, [cleanup.LeftoverProcess(one.pid, start + 1, "python", "")], signal.SIGTERM
    )  # it would be what ends it
    cleanup.signal_leftovers(
        real.node, [cleanup.LeftoverProcess(one.pid, start, "python", "")], signal.SIGKILL
    )
    assert one.wait(60) == -signal.SIGKILL


def test_an_epilog_and_what_is_above_it_are_spared(real: Real) -> None:
    real.left = {pid: "of the job" for pid in (os.getpid(), os.getppid(), 1)}
    assert real.clean() == []


# --- whose a process is ---------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return box_with_shepherd(tmp_path)


def hold(box: Box, **changes: object) -> Owner:
    node = box.node()
    return claim_devices(
        node, record(token="", devices=(), **changes), ClaimRequest(1), judging(node), soon()
    ).owner


def leftovers(box: Box, one: Owner, *pids: int) -> list[cleanup.LeftoverProcess]:
    """Return those of these processes that would be ended for a job."""
    node = box.node()

    def members(lock: Lock, scan: ProcessScan, job: JobProcesses) -> None:
        del lock, scan
        job.add(pids, "left")

    return cleanup.find_leftovers(node, lambda o: o.token == one.token, judge_with(node, members))


def left(box: Box, one: Owner, *pids: int) -> list[int]:
    return [found.pid for found in leftovers(box, one, *pids)]


def test_a_process_of_another_claim_is_that_ones(box: Box) -> None:
    one = hold(box)
    hold(box, job_id="13", pid=501, add_grp_id=65401)
    box.proc.add(700, groups=[65401])
    box.proc.add(701, groups=[GID])
    assert left(box, one, 700, 701) == [701]


ROOT = (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("owner", "name", "uids", "ended"),
    [
        *[(1000, "x", uids, False) for uids in (ROOT, (0, 1000, 0, 1000), (1001, 0, 0, 0))],
        *[(1000, "su", uids, True) for uids in ((1000, 0, 0, 0), (0, 1000, 1000, 1000))],
        (0, "x", ROOT, True),  # the job is root's
        *[(0, name, (0, 1000, 0, 1000), False) for name in sorted(DAEMONS)],
        (1000, "slurmd", (1000,) * 4, True),  # a user's process with a daemon's name
        (1000, "x", (1001,) * 4, True),  # a subordinate uid
    ],
)
def test_what_root_runs_is_no_users_job_but_what_its_user_may_end(
    box: Box, owner: int, name: str, uids: tuple[int, ...], ended: bool
) -> None:
    """As a `su` that waits for a password. A scheduler's daemon is nobody's."""
    one = hold(box, uid=owner)
    box.proc.add(700, name, uids=uids)
    assert left(box, one, 700) == [700] * ended


def test_a_name_of_any_bytes_can_be_told_and_of_many_the_first_four(box: Box) -> None:
    for pid in range(700, 705):
        box.proc.add(pid, os.fsdecode(b"\xff\xfe"))
    told = cleanup.format_leftovers(leftovers(box, hold(box), *range(700, 705)))
    assert told.isascii() and told.endswith(", left) and 1 more")
    assert told.count("process 70") == 4


def test_one_that_is_gone_is_not_left(box: Box) -> None:
    assert left(box, hold(box), 700) == []


# --- Slurm, where no cgroup marks a job's processes -----------------------------------------------


@pytest.mark.attack
def test_of_a_job_that_nothing_marks_the_owners_later_users_of_its_gpu_are_left(box: Box) -> None:
    """Tried: with proctrack/linuxproc, `env -i` and setsid, so that a process survives the job with
    its GPU open, and honest jobs on that GPU are cancelled.

    Stopped by: the open device: who opened it is the owner's, and began after the claim.
    """
    one = hold(box, uid=1000, claimed_boottime=0.0)
    node = box.node()
    claimed = node.store.read(bus(0)).owner
    assert claimed is not None
    later = int(claimed.claimed_boottime * TICKS) + 1
    fds = {9: box.dev / "nvidia0"}
    box.proc.add(700, uids=(1000,) * 4, start=later, fds=fds)
    box.proc.add(701, uids=(1000,) * 4, start=later - 100 * TICKS, fds=fds)
    box.proc.add(702, uids=(1001,) * 4, start=later, fds=fds)
    box.proc.add(703, uids=(1000,) * 4, start=later)

    def ended(unmarked: bool) -> list[int]:
        def members(lock: Lock, scan: ProcessScan, job: JobProcesses) -> None:
            del lock, scan
            job.unmarked = unmarked

        judge = judge_with(node, members)
        found = cleanup.find_leftovers(node, lambda o: o.token == one.token, judge)
        return [left.pid for left in found]

    assert (ended(True), ended(False)) == ([700], [])
