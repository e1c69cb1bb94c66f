# SPDX-License-Identifier: Apache-2.0
"""How long the looks at /proc take inside a process that has all loaded, among many processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_scan import ProcessScan
from gpulock.daemon.core.process_lister import ensure_process_list
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from tests.bench import table
from tests.bench.disturbed import undisturbed
from tests.bench.inprocess import OWNER, crowd, process_count, reaping, room_for, timed

GONE = "a release's look, owner gone"
ELSEWHERE = "the same, owner runs elsewhere"
BY_PROC = "  that, by /proc alone"
LIMITS = ((200, 3.0), (3000, 10.0), (30000, 30.0))  # processes, ms
GROUP = 65_400  # of the job that ended
ROUNDS = 21


def measure(root: Path, node: Node, counts: tuple[int, int]) -> list[table.Target]:
    """Print what the looks take among few, many and very many processes; return the targets.

    Raises RuntimeError where this machine has no pids for so many.
    """
    targets: list[table.Target] = []
    with process_list(root) as pins:
        for count, (_, limit) in zip((LIMITS[0][0], *counts), LIMITS):
            more = max(0, count - process_count())
            with room_for(more) as room:
                if not room:
                    raise RuntimeError(f"{count} processes: kernel.pid_max is too low; be root")
                with crowd(more):
                    rows = rows_among(node, pins, largest=count == counts[-1])
                    table.print_inside(f"within a process, {process_count()} processes", rows)
            for name in (GONE, ELSEWHERE):
                found = table.quantile(rows[name], 0.5)
                targets.append((f"{name}, {count} processes, ms", found, limit))
            if BY_PROC in rows:
                ratio = table.quantile(rows[BY_PROC], 0.5) / found
                print(f"  {ratio:.1f} x as long by /proc alone")
    return targets


def rows_among(node: Node, pins: str, largest: bool) -> dict[str, list[float]]:
    """Return the milliseconds of each look; the ways to list take turns."""
    rows: dict[str, list[float]] = {GONE: [timed_look(node, pins) for _ in range(ROUNDS)]}
    ways = {ELSEWHERE: pins, BY_PROC: ""} if pins else {ELSEWHERE: ""}
    with owner_runs():
        for _ in range(ROUNDS):
            for name, way in ways.items():
                rows.setdefault(name, []).append(timed_look(node, way))
    if not largest:
        everybody = [timed_look(node, pins, everybody=True) for _ in range(ROUNDS)]
        rows["a look at everybody's files"] = everybody
        rows["claim 2, settles 8 dead locks"] = reaping(node)
    return rows


def timed_look(node: Node, pins: str, everybody: bool = False) -> float:
    """Look at what a job's owner left, as a release does before the gate; or at all open files."""
    devices = node.devices()

    def look() -> None:
        scan = ProcessScan(Proc(pins=pins))
        files = OpenFiles(scan, devices, Settings({}))
        if everybody:
            files.pids_with_open("")
        else:
            scan.restrict({OWNER: "bench-owner"}, os.getppid())
            files.any_device_open((OWNER,))
            scan.carriers(GROUP)
        if scan.blind or files.blind:
            raise RuntimeError(f"the guard is blind: {scan.blind or files.blind}")

    return undisturbed(lambda: timed(look), lambda: None)


@contextmanager
def owner_runs() -> Generator[None]:
    """Let the owner have a process elsewhere on the node, as in a login; needs root."""
    process = subprocess.Popen(["/bin/sleep", "1000"], user=OWNER if os.getuid() == 0 else None)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def process_list(root: Path) -> Generator[str]:
    """Give the folder of a list of processes as gpulockd pins it; nothing where none can be."""
    top = root / "bpf"
    top.mkdir()
    command = ["mount", "-t", "bpf", "-o", "mode=0700", "bpf", str(top)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        folder = f"{top}/gpulock"
        why = done.stderr.strip() or ensure_process_list(Settings({}), folder)
        if why:
            print(f"\nprocesses are listed by /proc alone: {why}")
        yield "" if why else folder
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(top)], check=True)
