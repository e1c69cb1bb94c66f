# SPDX-License-Identifier: Apache-2.0
"""How many processes on a device are whose."""

from __future__ import annotations

from pathlib import Path

from gpulock_exporter.state.collector_state import classify_device_processes

from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import Proc
from gpulock.store.locks import Lock
from tests.support.exporter_nodes import lock
from tests.support.trees import FakeProc, record

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
    listed = dict.fromkeys(JOB + number for number in (0, 1, 3, 2, 4, 5))
    found = classify_device_processes(
        listed, [lock()], ProcessScan(Proc(str(proc.root))), ("Xorg",)
    )
    assert (found.nvml_count, found.foreign, found.unseen) == (5, (JOB + 2, JOB + 3), 1)


def test_memory_is_of_the_share_whose_process_uses_it(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    both, gone = (65401, 65402), JOB + 5
    for number, groups in enumerate(((65401,), (65402,), (65402,), (), both)):
        proc.add(JOB + number, groups=groups)
    bus = "0000:01:00.0"
    locks: list[Lock] = []
    for number, gid in ((1, 65401), (2, 65402), (3, 65402), (4, 65403)):
        owner = record(add_grp_id=gid, token=f"t{gid}", devices=(f"{bus}.share{number}",))
        locks.append(Lock(f"{bus}.share{number}", owner, ""))
    tree = ProcessScan(Proc(str(proc.root)))
    listed = {JOB + number: 10**number for number in range(5)} | {gone: 10**5}
    found = classify_device_processes(listed, locks, tree, ())
    used = {name.rpartition(".")[2]: memory for name, memory in found.share_memory.items()}
    assert used == {"share1": 1, "share2": 110, "share3": 0, "share4": 0}
    untold = {**listed, JOB + 6: None}
    assert classify_device_processes(untold, locks, tree, ()).share_memory == {}
    assert classify_device_processes(listed, [lock()], tree, ()).share_memory == {}
