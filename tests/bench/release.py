# SPDX-License-Identifier: Apache-2.0
"""How long a release looks at processes, among 200, 3,000 and 30,000, and a claim at many places.

Usage: python -m tests.bench.release, a part of `make bench`. Measured within a process that has all
loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store import boot, grants
from tests.bench.harness import Samples, Target, median, run_bench, undisturbed
from tests.support.claims import never
from tests.support.scene import Scene
from tests.support.trees import record, soon

GONE, ELSEWHERE = "the owner is gone", "the owner runs elsewhere"
# milliseconds by the number of processes
LIMITS = {
    GONE: {200: 2.0, 3000: 2.0, 30000: 2.0},
    ELSEWHERE: {200: 3.0, 3000: 20.0, 30000: 150.0},
}
OWNER, GROUP = 64_001, 65_400  # of the job that ended
ROUNDS = 21
HELD, CLAIM_LIMIT = 1023, 15.0  # places of others, milliseconds of a claim beside them
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


def measure(root: Path) -> list[Target]:
    """Return what the look takes at each number of processes, with its limits.

    Raises RuntimeError where this machine has no pids for so many.
    """
    node = Scene(root).node()
    devices = node.devices()
    targets = [Target(f"a claim, {HELD} places held, ms", claim_beside(node, HELD), CLAIM_LIMIT)]
    for count in LIMITS[GONE]:
        with crowd(max(0, count - process_count())):
            rows = look_rows(devices)
        targets += [
            Target(f"{name}, {count} processes, ms", median(rows[name]), limits[count])
            for name, limits in LIMITS.items()
        ]
    return targets


def claim_beside(node: Node, held: int) -> float:
    """Return the least milliseconds of processor time of a claim, so many places being held."""
    node.store.check(make=True)
    boot.begin_boot(node.store, node.settings.state_dir, node.boot_id, node.name)
    own, card = record(boot_id=node.boot_id, token="", devices=()), node.devices()[0].id
    for number in range(1, held + 1):
        place = own.copy(
            job_id=f"9{number}", token=f"t{number}", devices=(f"{card}{SHARE}{number}",)
        )
        grants.make_claim(node.store, place)
    taken: list[float] = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        grant = claim_devices(node, own, ClaimRequest(1), never, soon())
        taken.append(1e3 * (time.thread_time() - begun))
        grants.undo_claim(node.store, grant.owner.token, grant.owner.devices)
    return min(taken)


def look_rows(devices: list[Device]) -> Samples:
    """Return the milliseconds of each look."""
    rows: Samples = {GONE: [timed_look(devices) for _ in range(ROUNDS)]}
    user = OWNER if os.getuid() == 0 else None
    with subprocess.Popen(["/bin/cat"], user=user, stdin=subprocess.PIPE):  # to the block's end
        rows[ELSEWHERE] = [timed_look(devices) for _ in range(ROUNDS)]
    return rows


def timed_look(devices: list[Device]) -> float:
    """Look at what a job's owner left, as a release does before the gate; return milliseconds."""

    def look() -> float:
        begun = time.perf_counter()
        scan = ProcessScan(Proc())
        files = OpenFiles(scan, devices, Settings({}))
        scan.restrict({OWNER: "bench-owner"})
        files.users_by_device(OWNER)
        scan.carriers(GROUP)
        if scan.blind or files.blind:
            raise RuntimeError(f"the look is incomplete: {scan.blind or files.blind}")
        return 1e3 * (time.perf_counter() - begun)

    return undisturbed(look, lambda: None)


def process_count() -> int:
    """Return how many processes this machine has."""
    return len(Proc().pids())


@contextmanager
def crowd(count: int) -> Generator[None]:
    """Let so many cheap processes more live; root makes room meanwhile, as systemd does."""
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


if __name__ == "__main__":
    sys.exit(run_bench("release", measure))
