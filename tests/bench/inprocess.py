# SPDX-License-Identifier: Apache-2.0
"""How long a claim, a release and the looks at /proc take inside a process that has all loaded."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.release import release_locks
from gpulock.deadline import Deadline
from gpulock.hooks.common import observer_judge
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.store.owner import Owner
from gpulock.workstation.process_claims import make_liveness_judge, make_process_owner
from tests.bench.bare import bare, bare_looks, clear
from tests.bench.disturbed import Result, take_locks_away, undisturbed
from tests.support.scene import Scene, linked_proc

DRAIN = 100  # rounds
SWITCHED = 1000  # tries: on a busy machine many a claim is interrupted
BARE, BARE_LOCKS = "its bare system calls", "  those of the locks alone"
OWNER = 64_001  # of the job that ended
SPARE, PID_MAX = 1500, 1 << 22  # pids; the most there can be
CROWD = """\
import os, signal, sys
pids = []
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if not pid:
        if os.getuid() == 0:
            os.setresuid(64002, 64002, 64002)
        signal.pause()
    pids.append(pid)
print("ready", flush=True)
sys.stdin.read()
for pid in pids:
    os.kill(pid, signal.SIGKILL)
for pid in pids:
    os.waitpid(pid, 0)
"""


def timed(act: Callable[[], object]) -> float:
    """Return the milliseconds of one call."""
    begun = time.perf_counter_ns()
    act()
    return (time.perf_counter_ns() - begun) / 1e6


def take(node: Node, count: int, start: int = 0) -> Grant:
    """Claim for this process, or for one that is long over."""
    record = make_process_owner(node, os.getpid(), "bench")
    if start:
        record = record.copy(start=start, job_id="gone")
    return claim_devices(
        node, record, ClaimRequest(count), lambda: make_liveness_judge(node), Deadline(20)
    )


def give(node: Node, token: str) -> None:
    """Release one claim."""
    if (
        len(
            release_locks(
                node, lambda o: o.token == token, observer_judge(node), Deadline(20), "bench"
            ).freed
        )
        != 2
    ):
        raise RuntimeError("a release did not free 2 devices")


def claims(root: Path, rounds: int) -> dict[str, list[float]]:
    """Claim 2 of 8 and release them, where /proc shows this process alone: nothing to settle.

    Released locks are taken away now and then, as gpulockd does once it has their history.
    """
    root.mkdir()
    node = Scene(root, linked_proc(root / "proc", (os.getpid(),))).node()
    record = make_process_owner(node, os.getpid(), "bench")
    found = defaultdict[str, list[float]](list)
    for number in range(rounds + 20):
        if number % DRAIN == 0:
            drain(Path(node.store.released_dir))
        begun, between, ended = undisturbed(
            lambda: uninterrupted(lambda: claim_and_release(node, record)),
            lambda: take_locks_away(node),
            SWITCHED,
        )
        with Spent(Node, "devices") as driver, Spent(OpenFiles, "look") as look:
            undisturbed(lambda: claim_and_release(node, record), lambda: take_locks_away(node))
        floor = timed(lambda: bare(node))
        looks = timed(lambda: bare_looks(node))
        clear(node)
        if number >= 20:
            found["claim"].append((between - begun) / 1e6)
            found["release"].append((ended - between) / 1e6)
            found["claim + release"].append((ended - begun) / 1e6)
            found["  reading the driver's files"].append(driver.milliseconds)
            found["  looking at one process"].append(look.milliseconds)
            found[BARE].append(floor + looks)
            found["  the driver's files, the look"].append(looks)
            found[BARE_LOCKS].append(floor)
    return found


def uninterrupted(act: Callable[[], Result]) -> Result:
    """Return what `act` returns; raise RuntimeError where this process had to wait meanwhile.

    What others do with the processors is none of a claim's tail.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    result = act()
    if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw != before:
        raise RuntimeError("another process took the processor")
    return result


def claim_and_release(node: Node, record: Owner) -> tuple[int, int, int]:
    """Claim 2 and release them; return begin, middle and end in ns."""
    begun = time.perf_counter_ns()
    grant = claim_devices(
        node, record, ClaimRequest(2), lambda: make_liveness_judge(node), Deadline(20)
    )
    between = time.perf_counter_ns()
    give(node, grant.owner.token)
    return begun, between, time.perf_counter_ns()


class Spent:
    """Add up, for the length of a `with` block, the time spent in one method."""

    def __init__(self, of: type, name: str) -> None:
        self.milliseconds = 0.0
        self._of, self._name, self._real = of, name, getattr(of, name)

    def __enter__(self) -> Spent:
        def call(*args: object) -> object:
            begun = time.perf_counter_ns()
            try:
                return self._real(*args)
            finally:
                self.milliseconds += (time.perf_counter_ns() - begun) / 1e6

        setattr(self._of, self._name, call)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._of, self._name, self._real)


def drain(released: Path) -> None:
    """Take away released locks."""
    for path in released.iterdir() if released.is_dir() else ():
        shutil.rmtree(path)


@contextmanager
def room_for(count: int) -> Generator[bool]:
    """Tell whether this machine has pids for so many processes more, and for others' beside.

    Root makes room meanwhile, as systemd does on each 64-bit machine: where numbers may come round
    within a look, it lists all once more.
    """
    path = Path("/proc/sys/kernel/pid_max")
    before, needed = int(path.read_text()), process_count() + count + SPARE
    raised = before < PID_MAX and os.getuid() == 0
    try:
        if raised:
            path.write_text(f"{PID_MAX}\n")
        yield raised or before > needed
    finally:
        if raised:
            path.write_text(f"{before}\n")


def reaping(node: Node, rounds: int = 7) -> list[float]:
    """Claim where all 8 devices are a dead owner's: judge them, guard, free, lock."""

    def round_() -> float:
        take(node, 8, start=1)
        tokens: list[str] = []
        spent = timed(lambda: tokens.append(take(node, 2).owner.token))
        give(node, tokens[0])
        return spent

    return [undisturbed(round_, lambda: take_locks_away(node)) for _ in range(rounds)]


@contextmanager
def crowd(count: int) -> Generator[None]:
    """Let so many cheap processes live."""
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", CROWD, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{count} processes cannot be started")
        yield
    finally:
        process.communicate("")


def process_count() -> int:
    """Return how many processes this machine has."""
    return len(Proc().pids())
