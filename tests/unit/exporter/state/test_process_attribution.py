# SPDX-License-Identifier: Apache-2.0
"""How many processes on a device are whose."""

from __future__ import annotations

from pathlib import Path

from gpulock_exporter.state.collector_state import classify_device_processes
from gpulock_exporter.telemetry import Process

from gpulock.alloc.process_owner import ProcessTree
from gpulock.node.procfs import Proc
from tests.support.exporter_nodes import lock
from tests.support.trees import FakeProc

ROOT = (0, 0, 0, 0)
JOB = 700


def test_all_on_a_device_are_counted_by_whose_they_are(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.add(JOB, groups=(65400,))
    proc.add(JOB + 1, "Xorg", uids=ROOT)
    proc.add(JOB + 3)
    proc.add(JOB + 2)
    proc.add(JOB + 4)
    (proc.root / str(JOB + 4) / "status").write_text("nonsense")
    listed = [Process(JOB + number) for number in (0, 1, 3, 2, 4, 5)]
    found = classify_device_processes(
        listed, [lock()], ProcessTree(Proc(str(proc.root))), ("Xorg",)
    )
    assert (found.listed, found.foreign, found.unseen) == (5, (JOB + 2, JOB + 3), 1)
