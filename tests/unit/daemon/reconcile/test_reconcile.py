# SPDX-License-Identifier: Apache-2.0
"""One reconcile: settle, publish, count; a dry run only looks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.deadline import clock_boottime
from gpulock.store import verdicts
from gpulock.store.event_log import count_events, read_events
from tests.support.locks import place_lock
from tests.support.trees import Box, bus, judge_of, record, soon


def hold(box: Box, number: int, pid: int, **changes: object) -> None:
    one = record(pid=pid, token=f"t{pid}", devices=(bus(number),), **changes)
    place_lock(box.node().store, bus(number), one)


def run(box: Box, dry_run: bool = False) -> ReconcileReport:
    node = box.node()
    return reconcile_locks(node, judge_of(node), soon(), dry_run)


def test_the_dead_go_the_living_stay_and_everybody_can_read_why(box: Box) -> None:
    box.proc.shepherd(500, box.root)
    hold(box, 0, 500)
    hold(box, 1, 501)
    hold(box, 2, 502, namespaces="pid:[99]")
    report = run(box)
    assert [o.act for o in report.outcomes] == ["held", "freed", "held"]
    assert box.locks() == [bus(0), bus(2)]
    known, _ = verdicts.read_dated_verdicts(str(box.lock), clock_boottime(), box.node().boot_id)
    assert known is not None
    assert {token: v.state for token, v in known.items()} == {"t500": "alive", "t502": "unknown"}
    assert count_events(read_events(str(box.lock)))["reaped_shepherd"] == 1
    assert [pid for pid, _ in report.processes] == [500, 502], "whose end gpulockd waits for"


OF_A_PROCESS = {"scheduler": "process", "job_id": "501", "add_grp_id": 0, "uid": 1000}


@pytest.mark.parametrize(
    ("owner", "left", "act"),
    [
        (OF_A_PROCESS, "its mark", "held"),  # what `gpulock run` left in a session of its own
        (OF_A_PROCESS, "the GPU", "held"),
        ({}, "its group", "held"),
        ({"draining": 1}, "its group", "held"),
        ({"draining": 1}, "the GPU", "orphans"),
    ],
)
def test_what_is_left_of_a_claim_whose_process_is_gone_is_waited_for_one_after_another(
    box: Box, owner: dict[str, object], left: str, act: str
) -> None:
    """Its card waits for no pause of gpulockd."""
    hold(box, 0, 501, **owner)
    for pid in (601, 602):
        fds = {3: box.dev / "nvidia0"} if left == "the GPU" else {}
        groups = [65400] if left == "its group" else []
        box.proc.add(pid, start=pid, fds=fds, groups=groups)
        mark = b"GPULOCK_CLAIM=t501\0" if left == "its mark" else b""
        (box.proc.root / f"{pid}/environ").write_bytes(mark)
    seen: set[int] = set()
    for _ in range(2):
        report = run(box)
        assert [one.act for one in report.outcomes] == [act]
        ((pid, start),) = report.processes[1:]
        assert start == pid
        box.proc.remove(pid)
        seen.add(pid)
    assert seen == {601, 602}
    assert [one.act for one in run(box).outcomes] == ["freed"]


def test_a_dry_run_changes_nothing_but_the_gate(box: Box) -> None:
    hold(box, 1, 501)
    before = sorted(box.lock.rglob("*"))
    assert [o.act for o in run(box, dry_run=True).outcomes] == ["freed"]
    assert sorted({*box.lock.rglob("*")} - {box.records / "gate"}) == before


def test_a_dry_run_on_a_node_that_never_claimed_makes_nothing(tmp_path: Path) -> None:
    box = Box(tmp_path)
    assert run(box, dry_run=True).outcomes == []
    assert not box.lock.exists()


def test_folders_that_were_removed_are_made_again(box: Box) -> None:
    os.rmdir(box.state / "quarantine")
    run(box)
    assert (box.state / "quarantine").is_dir()
