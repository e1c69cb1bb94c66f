# SPDX-License-Identifier: Apache-2.0
"""What the files say of a node: nothing of another boot counts."""

from __future__ import annotations

import pytest

from gpulock.alloc.node_view import find_lost_records, read_node_verdicts, read_node_view
from gpulock.deadline import clock_boottime
from gpulock.store.verdicts import ALIVE, Verdict, write_verdicts
from tests.support.trees import BOOT, OTHER_BOOT, Box


def test_verdicts_that_are_garbage_are_not_known(box: Box) -> None:
    box.lock.mkdir()
    box.records.mkdir()
    (box.records / "boot_id").write_text(f"{BOOT}\n")
    (box.lock / "verdicts").write_text("garbage")
    view = read_node_view(box.node(), clock_boottime())
    assert (view.verdicts, view.fault) == (None, "")
    (box.records / "boot_id").unlink()
    (box.records / "boot_id").mkdir()
    view = read_node_view(box.node(), clock_boottime())
    assert (view.lost, view.fault != "") == (None, True)


@pytest.mark.parametrize(
    ("lock", "state", "lost"),
    [
        (BOOT, BOOT, False),
        ("", BOOT, True),
        (OTHER_BOOT, BOOT, True),  # a LOCK_DIR of an earlier boot that was put back
        (OTHER_BOOT, OTHER_BOOT, False),
        ("", "", False),
    ],
)
def test_locks_are_lost_where_state_dir_alone_has_seen_this_boot(
    box: Box, lock: str, state: str, lost: bool
) -> None:
    box.records.mkdir()
    for folder, boot_id in ((box.records, lock), (box.state, state)):
        if boot_id:
            (folder / "boot_id").write_text(f"{boot_id}\n")
    assert (find_lost_records(box.node()) is not None) == lost


def test_while_locks_are_lost_no_verdict_is_known(box: Box) -> None:
    for folder in (box.lock, box.records):
        folder.mkdir()
    write_verdicts(str(box.lock), {"feed": Verdict(ALIVE, "its shepherd runs")}, BOOT)
    assert read_node_verdicts(box.node(), clock_boottime()) == (None, None)
    (box.records / "boot_id").write_text(f"{BOOT}\n")
    found, _ = read_node_verdicts(box.node(), clock_boottime())
    assert found is not None and list(found) == ["feed"]
