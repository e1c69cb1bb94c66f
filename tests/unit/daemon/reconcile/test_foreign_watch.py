# SPDX-License-Identifier: Apache-2.0
"""gpulockd tells, counts and names processes of no claim; they keep no lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.alloc.node_view import read_node_view
from gpulock.daemon.reconcile.foreign_watch import LINES, SHARE, ForeignWatch, foreign_messages
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.deadline import clock_boottime
from gpulock.store.foreign import SHOWN, ForeignUse, read_foreign_uses, write_foreign_uses
from gpulock.store.verdicts import FRESH
from tests.support.journal import HeardJournal
from tests.support.locks import place_lock
from tests.support.trees import BOOT, OTHER_BOOT, Box, bus, record

OTHER = 61_002
LONGEST = 60.0  # seconds that a look here takes on a busy machine


@pytest.fixture
def box(tmp_path: Path) -> Box:
    found = Box(tmp_path)
    found.node().store.check(make=True)
    (found.records / "boot_id").write_text(f"{BOOT}\n")
    return found


def look(box: Box, watch: ForeignWatch, now: float | None = None) -> dict[str, ForeignUse]:
    node = box.node()
    report = ReconcileReport([], [], devices=node.devices())
    watch.run(node, report, clock_boottime() if now is None else now)
    return read_node_view(node, clock_boottime()).open_foreign


def test_a_process_of_no_claim_is_told_counted_and_named(box: Box) -> None:
    place_lock(box.node().store, bus(0), record())
    fds = {n: box.dev / f"nvidia{n}" for n in (0, 1)}
    box.proc.add(700, "nvtop", uids=(OTHER,) * 4, fds=fds)
    box.proc.add(701, groups=[65_400], fds=fds)  # the claim's own
    box.proc.add(702, "nvidia-persiste", uids=(0,) * 4, fds=fds)
    journal = HeardJournal()
    watch = ForeignWatch(journal)
    found = look(box, watch)
    assert {device: (use.count, use.processes) for device, use in found.items()} == dict.fromkeys(
        (bus(0), bus(1)), (1, [(700, OTHER, "nvtop")])
    )
    (line,) = journal.said()
    assert "process 700 (nvtop) of uid 61002, of no claim, has" in line
    assert line.endswith(f"{bus(0)} {bus(1)} open beside a claim")
    box.proc.remove(700)
    assert look(box, watch, clock_boottime() + SHARE * LONGEST) == {}
    assert "no longer: foreign" in journal.said()[0]


def test_it_looks_the_more_seldom_the_longer_that_takes(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 101.0, 100.0])
    monkeypatch.setattr(
        "gpulock.daemon.reconcile.foreign_watch.clock_boottime", lambda: next(times)
    )
    watch = ForeignWatch(HeardJournal())
    look(box, watch, 100.0)
    box.proc.add(700, uids=(OTHER,) * 4, fds={3: box.dev / "nvidia0"})
    look(box, watch, 100.0 + SHARE - 1)  # asks no clock
    assert "0000" not in (box.lock / "foreign").read_text()


def test_many_processes_are_counted_and_some_are_named(box: Box) -> None:
    for pid in range(700, 700 + LINES + 4):
        box.proc.add(pid, "a b\nc", uids=(OTHER,) * 4, fds={3: box.dev / "nvidia0"})
    journal = HeardJournal()
    use = look(box, ForeignWatch(journal))[bus(0)]
    assert (use.count, len(use.processes)) == (LINES + 4, SHOWN)
    assert use.describe("uid {}".format).endswith(f"of uid {OTHER} and {LINES + 4 - SHOWN} more")
    assert all(" " not in name for _, _, name in use.processes)


def test_so_many_lines_are_told_at_a_time() -> None:
    many = {bus(0): ForeignUse(40, [(pid, OTHER, "x") for pid in range(40)])}
    found = foreign_messages(many, {}, ", at least: blind")
    assert len(found) == LINES + 1
    assert found["more"] == "foreign: 40 processes of no claim have a GPU open, at least: blind"


@pytest.mark.parametrize(
    ("boot_id", "later", "known"),
    [(BOOT, 1.0, True), (OTHER_BOOT, 1.0, False), (BOOT, FRESH + 31, False), (BOOT, -1.0, False)],
)
def test_what_is_old_or_of_another_boot_is_not_known(
    tmp_path: Path, boot_id: str, later: float, known: bool
) -> None:
    use = {bus(0): ForeignUse(1, [(700, OTHER, "a:b")])}
    write_foreign_uses(str(tmp_path), use, boot_id, 100.0, 130.0)
    found = read_foreign_uses(str(tmp_path), 100.0 + later, BOOT)
    assert (found is not None) is known
    if found:
        assert found[bus(0)].processes == [(700, OTHER, "a:b")]


def test_without_a_file_nothing_is_known(tmp_path: Path) -> None:
    assert read_foreign_uses(str(tmp_path), 0.0, BOOT) is None
