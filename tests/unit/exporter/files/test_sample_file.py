# SPDX-License-Identifier: Apache-2.0
"""The sample: what is written, who reads it, and what an exporter reads back from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpulock_exporter.files.publish import ExporterFolder
from gpulock_exporter.files.sample_file import restore_exporter_memory
from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.state.collector_state import ExporterMemory

from gpulock.node.sample import SAMPLE_LINE, parse_sample
from gpulock.store import atomic
from tests.support.exporter_nodes import Node, card, facts, full_card, lock, uuid
from tests.support.faults import disk_full
from tests.support.trees import BOOT, OTHER_BOOT, FakeProc, bus

A = "aaaaaaaaaaaaaaaa"

SAMPLE = f"""\
gpulock-sample 1
boot_id={BOOT}
sequence=3
boottime=1003.0
wall=1700001003.0
looked=1003.0
driver=580.1
device {bus(0)} uuid={uuid(0)} index=0 looked=1003.0 utilization=0.5 memory_used=10737418240 \
memory_total=85899345920 busy=1.0 observed=2.0 last_busy=1003.0 energy=700.0 \
processes=2 listed=1003.0 foreign=1 unseen=0 foreign_pids=77 \
c.energy=700.0,700.0,1003.0
device {bus(1)} uuid={uuid(1)} index=1 looked=1003.0
token {A} {bus(0)} since=1001.0 until=1003.0 busy=1.0 observed=2.0 seen=1003.0 idle=0.0 \
last_busy=1003.0 energy=600.0 memory_peak=10737418240 foreign=1.0 width=1.0 used=500,500 \
covered=1000,1000
"""


def unknown(number: int) -> DeviceTelemetry:
    """Return a card that tells nothing but who it is."""
    return DeviceTelemetry(bus(number), uuid(number), number)


def scene(tmp_path: Path) -> Node:
    """Return a node after three seconds: a claim, a process of a stranger and one of a service."""
    proc = FakeProc(tmp_path / "proc")
    proc.add(77, "python", uids=(1000,) * 4)
    proc.add(78, "Xorg", uids=(0,) * 4)
    node = Node(proc=str(proc.root))
    node.facts = facts(lock(0, A, claimed_boottime=1001.0))
    node.tick(card(0, energy=100.0), unknown(1))
    node.tick(card(0, energy=400.0), unknown(1))
    node.tick(card(0, energy=700.0, processes={77: None, 78: None}), unknown(1))
    return node


def again(node: Node, now: float | None = None, boot: str = BOOT) -> ExporterMemory:
    """Return what an exporter that starts now remembers."""
    return restore_exporter_memory(
        parse_sample(node.text(), SAMPLE_LINE), boot, node.now if now is None else now
    )


def test_the_sample_is_as_the_table_says(tmp_path: Path) -> None:
    assert scene(tmp_path).text() == SAMPLE


def test_a_restarted_exporter_goes_on_where_it_was(tmp_path: Path) -> None:
    node = scene(tmp_path)
    node.tick(card(0), unknown(1))
    text = node.text()
    node.book.memory = again(node)
    assert node.text() == text


def test_a_sample_that_could_not_be_replaced_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More was told since: counters that went on from it would fall below that."""
    folder = ExporterFolder(str(tmp_path))
    folder.write_sample(SAMPLE)
    assert folder.last() is not None
    monkeypatch.setattr(atomic, "replace_file", disk_full)
    with pytest.raises(OSError, match="No space"):
        folder.write_sample(SAMPLE)
    assert folder.last() is None


def test_nothing_of_another_boot_or_of_the_future_is_remembered(tmp_path: Path) -> None:
    node = scene(tmp_path)
    for memory in (
        again(node, boot=OTHER_BOOT),
        again(node, now=10.0),
        restore_exporter_memory(None, BOOT, 1.0),
    ):
        assert (memory.totals.devices, memory.ledger.accounts, memory.sequence) == ({}, {}, 0)


@pytest.mark.parametrize(
    "line",
    [
        f"device {bus(0)} looked=nan busy=1",
        f"device {bus(0)} looked=999999 busy=1 observed=1",
        f"device {bus(0)} looked=5 busy=9 observed=1 c.energy=1,2 x.y=1,2 x.7=nan,1",
        f"token {A} {bus(0)} since=99999999 width=nan used=1,2",
    ],
)
def test_a_sample_that_was_tampered_with_is_survived(line: str) -> None:
    memory = restore_exporter_memory(
        parse_sample(f"{SAMPLE_LINE}\nboot_id={BOOT}\n{line}\n", SAMPLE_LINE), BOOT, 1000
    )
    node = Node(memory)
    node.facts = facts(lock(0, A))
    for _ in range(3):
        node.tick(full_card(0))
    for totals in memory.totals.devices.values():
        assert totals.busy <= totals.observed
