# SPDX-License-Identifier: Apache-2.0
"""What the files say of a node: nothing of another boot counts."""

from __future__ import annotations

from gpulock.alloc.node_view import read_node_view
from gpulock.deadline import clock_boottime
from tests.support.trees import BOOT, Box


def test_verdicts_that_are_garbage_are_not_known(box: Box) -> None:
    box.lock.mkdir()
    box.records.mkdir()
    (box.records / "boot_id").write_text(f"{BOOT}\n")
    (box.lock / "verdicts").write_text("garbage")
    view = read_node_view(box.node(), clock_boottime())
    assert (view.verdicts, view.fault) == (None, "")
