# SPDX-License-Identifier: Apache-2.0
"""What gpulockd costs a node that idles, and how long a reconcile of a large one takes.

Usage: python tests/bench/daemon.py [--crowd N]; `make bench` has the same rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from gpulock.alloc.choose import ClaimRequest  # noqa: E402 (the checkout is put on the path first)
from gpulock.alloc.claim import claim_devices  # noqa: E402
from gpulock.alloc.reaper import FREED, HELD  # noqa: E402
from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks  # noqa: E402
from gpulock.deadline import Deadline  # noqa: E402
from gpulock.node.context import Node  # noqa: E402
from gpulock.store.locks import GRANT  # noqa: E402
from gpulock.store.owner import Owner  # noqa: E402
from gpulock.store.verdicts import PERIOD  # noqa: E402
from gpulock.workstation.process_claims import make_liveness_judge, make_process_owner  # noqa: E402
from tests.bench.disturbed import print_disturbances, undisturbed  # noqa: E402
from tests.bench.inprocess import crowd, process_count, timed  # noqa: E402
from tests.bench.table import print_targets, quantile  # noqa: E402
from tests.support.scene import Scene, folder  # noqa: E402
from tests.support.trees import Box, bus  # noqa: E402

MAIN = "import sys; from gpulock.daemon.app import main; sys.exit(main())"
PROCESSES = 300
ROUNDS = 20
GPUS, LEFTOVERS = 128, 1000
MEBI = 1024  # KiB

Target = tuple[str, float, float]


class Daemon:
    """A gpulockd of its own on a node, which is told to go round and says when it has."""

    def __init__(self, scene: Scene, listening: socket.socket) -> None:
        self._manager = listening
        env = {
            "NOTIFY_SOCKET": listening.getsockname(),
            "PYTHONPATH": f"{sys.path[0]}:{sysconfig.get_path('purelib')}",
        }
        argv = [sys.executable, "-S", "-c", MAIN, "--config", str(scene.config)]
        self.process = subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL)
        self.wait()

    def wait(self) -> None:
        """Wait until a round is over."""
        while not self._manager.recv(4096).startswith(b"READY=1"):
            continue

    def round(self) -> None:
        """Have it reconcile."""
        self.process.send_signal(1)
        self.wait()

    def cpu(self) -> float:
        """Return the processor time that it has used, in seconds."""
        text = Path(f"/proc/{self.process.pid}/schedstat").read_text()
        return int(text.split()[0]) / 1e9

    def resident(self) -> float:
        """Return its resident memory in MiB."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / MEBI
        raise RuntimeError("gpulockd has no memory")


@contextmanager
def running(scene: Scene) -> Generator[Daemon]:
    """Run a gpulockd on a node."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(scene.root / "notify"))
        listening.settimeout(60)
        daemon = Daemon(scene, listening)
        try:
            yield daemon
        finally:
            daemon.process.terminate()
            daemon.process.wait(10)


def idle(root: Path, others: int) -> tuple[float, float, float]:
    """Return (MiB, % of a core, that with a look at all processes in each round).

    Of 8 devices 4 are held by a process that lives. The look is forced by a claim whose process
    has ended and whose session goes on.
    """
    scene = Scene(root)
    node = scene.node()
    with crowd(max(0, others - process_count())), running(scene) as daemon:
        for _ in range(2):
            record = make_process_owner(node, os.getpid(), "bench").copy(sid=0)
            hold_two(node, record)
        quiet = share(daemon)
        gone = make_process_owner(node, os.getpid(), "bench").copy(pid=1 << 22, sid=os.getsid(0))
        hold_two(node, gone)
        looking = share(daemon)
        return daemon.resident(), quiet, looking


def hold_two(node: Node, record: Owner) -> None:
    """Claim two devices for the owner of a record, as a claim of its own."""
    number = len(node.store.read_all_locks()) if node.store.exists() else 0
    own = record.copy(job_id=f"{record.job_id}.{number}")
    claim_devices(node, own, ClaimRequest(2), lambda: make_liveness_judge(node), Deadline(20))


def share(daemon: Daemon) -> float:
    """Return the processor time of a round as a share of the time between two, in %."""
    daemon.round()
    costs: list[float] = []
    for _ in range(ROUNDS):
        before = daemon.cpu()
        daemon.round()
        costs.append(daemon.cpu() - before)
    return 100 * statistics.median(costs) / PERIOD


def large(root: Path) -> dict[str, list[float]]:
    """Return the milliseconds of reconciles of 128 devices with 1,000 files left behind."""
    box = Box(root, GPUS, PROC_ROOT="/proc")
    node = box.node()
    rows: dict[str, list[float]] = {"128 held, alive": [], "128 held, dead": []}
    reconcile_locks(node, make_liveness_judge(node), Deadline(60))
    for row, start in (("128 held, alive", 0), ("128 held, dead", 1)):

        def once(row: str = row, start: int = start) -> float:
            leave_behind(box)
            hold_all(node, start)
            reports: list[ReconcileReport] = []
            spent = timed(
                lambda: reports.append(
                    reconcile_locks(node, make_liveness_judge(node), Deadline(60))
                )
            )
            wrong = [one for one in reports[0].outcomes if one.act != (FREED if start else HELD)]
            if wrong:
                why = f"{wrong[0].verdict.proof}: {wrong[0].reason}"
                raise RuntimeError(f"{row}: {len(wrong)} locks {wrong[0].act} ({why})")
            clear(box)
            return spent

        rows[row] += [undisturbed(once, lambda: clear(box)) for _ in range(5)]
    return rows


def hold_all(node: Node, start: int) -> None:
    """Lock every device for this process, or for one with another start that is long over."""
    held = make_process_owner(node, os.getpid(), "bench")
    for number in range(GPUS):
        own = held.copy(token=f"{number:016x}", devices=(bus(number),), minor=str(number))
        node.store.make(bus(number), own.copy(start=start or held.start, sid=0))


def leave_behind(box: Box) -> None:
    """Leave what killed processes leave in LOCK_DIR."""
    for number in range(LEFTOVERS):
        (box.lock / f".totals.{number:012x}").touch()


def clear(box: Box) -> None:
    """Take all locks away, what tells that they were made, and what was released."""
    for path in box.lock.glob(f"{GRANT}*"):
        path.unlink()
    for name in ("locks", "released"):
        shutil.rmtree(box.lock / name)
        (box.lock / name).mkdir()


def measure(root: Path, others: int) -> list[Target]:
    """Measure everything; print it and return the targets."""
    print(f"\ngpulockd, {ROUNDS} rounds; {PERIOD:.0f} s between two")
    print(f"  {'processes':>10}{'MiB':>8}{'% of a core':>14}{'with a look at all':>20}")
    targets: list[Target] = []
    for count in (PROCESSES, others):
        memory, quiet, looking = idle(root / f"idle-{count}", count)
        print(f"  {count:10}{memory:8.1f}{quiet:14.4f}{looking:20.4f}")
        if count == PROCESSES:
            targets = [
                ("gpulockd idle, MiB", memory, 24.0),  # filelock is 8 of them
                ("gpulockd idle, % of a core", quiet, 0.05),
                ("gpulockd with a look at all processes, % of a core", looking, 0.05),
            ]
    for row, values in large(root / "large").items():
        middle = quantile(values, 0.5)
        targets.append((f"reconcile, {row}, {LEFTOVERS} files left, ms", middle, 100.0))
    return targets


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description="what gpulockd costs")
    parser.add_argument("--crowd", type=int, default=3000, help="processes in the large look")
    begun = time.monotonic()
    with folder("bench-daemon") as root:
        print_targets(measure(root, parser.parse_args().crowd))
    print_disturbances()
    print(f"\n{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
