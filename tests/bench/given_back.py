# SPDX-License-Identifier: Apache-2.0
"""How long a claim takes that must end HEALTH_COMMAND's test of the last free GPU first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.daemon.health.health_command import GaveWayError, HealthCommand
from gpulock.deadline import Deadline, clock_boottime
from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.workstation.process_claims import make_liveness_judge, make_process_owner
from tests.bench import table
from tests.bench.disturbed import take_locks_away, undisturbed
from tests.bench.inprocess import timed
from tests.support.scene import Scene

LIMITS = ((1, 100.0), (101, 250.0))  # processes of a test, ms: of it two looks at all processes
ROUNDS = 15
SCRIPT = """\
#!/bin/sh
number=0
while [ $number -lt {children} ]; do sleep 1000 & number=$((number + 1)); done
echo >{ready}
exec sleep 1000
"""


def measure(root: Path) -> list[table.Target]:
    """Print what a claim takes that ends a test of so many processes; return the targets."""
    rows = {f"a test of {count} processes": timed_claims(root, count - 1) for count, _ in LIMITS}
    table.print_inside("a claim that ends the test of a GPU first", rows)
    return [
        (f"claim that ends {name}, ms", table.quantile(values, 0.5), limit)
        for (name, values), (_, limit) in zip(rows.items(), LIMITS)
    ]


def timed_claims(root: Path, children: int) -> list[float]:
    """Return the milliseconds of each claim that takes its GPUs from a test."""
    folder = root / f"given-back-{children}"
    folder.mkdir()
    ready, program = folder / "ready", folder / "test"
    os.mkfifo(ready)
    ready.chmod(0o666)
    program.write_text(SCRIPT.format(children=children, ready=ready))
    program.chmod(0o755)
    scene = Scene(folder)
    with scene.config.open("a") as file:
        file.write(f"HEALTH_COMMAND={program}\n")
    node = Node(read_settings(str(scene.config)))
    node.store.check(make=True)
    claim_all_gpus(node)
    return [
        undisturbed(round_of(node, ready), lambda: take_locks_away(node)) for _ in range(ROUNDS)
    ]


def round_of(node: Node, ready: Path) -> Callable[[], float]:
    """Return one round: a test begins, and a claim of all GPUs ends it."""

    def round_() -> float:
        take_locks_away(node)
        test = HealthCommand(node, node.devices()[0], clock_boottime())
        ready.read_text()  # all its processes run
        try:
            return timed(lambda: claim_all_gpus(node))
        finally:
            try:
                test.poll(node, clock_boottime())
            except GaveWayError:
                pass

    return round_


def claim_all_gpus(node: Node) -> None:
    """Claim all GPUs for this process."""
    record = make_process_owner(node, os.getpid(), "bench")
    want = ClaimRequest(len(node.devices()))
    claim_devices(node, record, want, lambda: make_liveness_judge(node), Deadline(20))
