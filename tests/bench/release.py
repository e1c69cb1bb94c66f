# SPDX-License-Identifier: Apache-2.0
"""How long a release looks at processes, among 200, 3,000 and 30,000: a part of `make bench`.

Usage: python -m tests.bench.release. Measured within a process that has all loaded; the
ways to list processes take turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_scan import ProcessScan
from gpulock.daemon.core.process_lister import ensure_process_list
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from tests.bench.harness import Samples, Target, median, print_rows, run_bench, timed, undisturbed
from tests.support.scene import Scene

GONE, ELSEWHERE, BY_PROC = "the owner is gone", "the owner runs elsewhere", "that, by /proc alone"
LIMITS = {200: 3.0, 3000: 10.0, 30000: 30.0}  # milliseconds by the number of processes
OWNER, GROUP = 64_001, 65_400  # of the job that ended
ROUNDS = 21
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


def measure(root: Path, limits: dict[int, float]) -> list[Target]:
    """Print what the look takes at each number of processes; return the targets.

    Raises RuntimeError where this machine has no pids for so many.
    """
    targets: list[Target] = []
    node = Scene(root).node()
    with process_list(root) as pins:
        for count, limit in limits.items():
            with crowd(max(0, count - process_count())):
                rows = look_rows(node, pins)
                print_rows(f"a release's look among {process_count()} processes", rows)
            targets += [
                Target(f"{name}, {count} processes, ms", median(rows[name]), limit)
                for name in (GONE, ELSEWHERE)
            ]
    return targets


def look_rows(node: Node, pins: str) -> Samples:
    """Return the milliseconds of each look."""
    rows: Samples = {GONE: [timed_look(node, pins) for _ in range(ROUNDS)]}
    ways = {ELSEWHERE: pins, BY_PROC: ""} if pins else {ELSEWHERE: ""}
    user = OWNER if os.getuid() == 0 else None
    with subprocess.Popen(
        ["/bin/cat"], user=user, stdin=subprocess.PIPE
    ):  # to the end of the block
        for _ in range(ROUNDS):
            for name, way in ways.items():
                rows.setdefault(name, []).append(timed_look(node, way))
    return rows


def timed_look(node: Node, pins: str) -> float:
    """Look at what a job's owner left, as a release does before the gate; return milliseconds."""
    devices = node.devices()

    def look() -> None:
        scan = ProcessScan(Proc(pins=pins))
        files = OpenFiles(scan, devices, Settings({}))
        scan.restrict({OWNER: "bench-owner"}, os.getppid())
        files.any_device_open((OWNER,))
        scan.carriers(GROUP)
        if scan.blind or files.blind:
            raise RuntimeError(f"the look is incomplete: {scan.blind or files.blind}")

    return undisturbed(lambda: timed(look), lambda: None)


def process_count() -> int:
    """Return how many processes this machine has."""
    return len(Proc().pids())


@contextmanager
def crowd(count: int) -> Generator[None]:
    """Let so many cheap processes more live.

    Root makes room meanwhile, as systemd does on each 64-bit machine: where numbers may come round
    within a look, it lists all once more.
    """
    path = Path("/proc/sys/kernel/pid_max")
    before, program = int(path.read_text()), [sys.executable, "-IS", "-c", CROWD, str(count)]
    raised = before < PID_MAX and os.getuid() == 0
    if not raised and before <= process_count() + count + SPARE:
        raise RuntimeError(f"{count} processes more: kernel.pid_max is too low; be root")
    try:
        if raised:
            path.write_text(f"{PID_MAX}\n")
        pipe = subprocess.PIPE
        with subprocess.Popen(
            program, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        ) as process:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{count} processes cannot be started")
            yield  # at the end of its standard input the crowd ends
    finally:
        if raised:
            path.write_text(f"{before}\n")


@contextmanager
def process_list(root: Path) -> Generator[str]:
    """Give the folder of a list of processes as gpulockd pins it; nothing where none can be."""
    top = root / "bpf"
    top.mkdir()
    command = ["mount", "-t", "bpf", "-o", "mode=0700", "bpf", str(top)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        pins = f"{top}/gpulock"
        why = done.stderr.strip() or ensure_process_list(Settings({}), pins)
        if why:
            print(f"\nprocesses are listed by /proc alone: {why}")
        yield "" if why else pins
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(top)], check=True)


if __name__ == "__main__":
    sys.exit(run_bench("release", lambda root: measure(root, LIMITS)))
