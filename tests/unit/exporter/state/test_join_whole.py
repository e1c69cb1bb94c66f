# SPDX-License-Identifier: Apache-2.0
"""The parent's half as it is put together: real locks, real files, frames of a test."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpulock_exporter.clock import Moment, current_moment
from gpulock_exporter.files.publish import ExporterFolder
from gpulock_exporter.files.sample_file import restore_exporter_memory, sample_text
from gpulock_exporter.state.collector_state import CollectorState
from gpulock_exporter.state.join import take_snapshot
from gpulock_exporter.state.local_state import read_local_state
from gpulock_exporter.state.node_devices import DeviceList
from gpulock_exporter.state.snapshot import ExporterHealth, NodeSnapshot
from gpulock_exporter.telemetry import Frame, Process

from gpulock.alloc.process_scan import ProcessScan
from gpulock.cli.status.status_view import view_node
from gpulock.node.context import Node
from gpulock.store import boot, quarantine, verdicts
from gpulock.store.verdicts import ALIVE, DEAD, Verdict
from tests.support.exporter_nodes import card
from tests.support.locks import place_lock
from tests.support.trees import BOOT, Box, bus, record

A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"


class Exporter:
    """An exporter of one node, as the program wires it."""

    def __init__(self, box: Box) -> None:
        self.node: Node = box.node()
        self.start = current_moment()
        self.seconds = 0.0
        self.folder = ExporterFolder(str(box.root / "exporter"))
        self.folder.open()
        self.devices = DeviceList(self.node.devices)
        self.devices.read()
        self.book = CollectorState(
            self.node.boot_id,
            self.node.settings,
            lambda: ProcessScan(self.node.proc),
            restore_exporter_memory(self.folder.last(), self.node.boot_id, self.now.boottime),
        )

    @property
    def now(self) -> Moment:
        return Moment(self.start.boottime + self.seconds, self.start.wall + self.seconds)

    def tick(self, *frames: Frame) -> NodeSnapshot:
        """Do what is due each second."""
        now = self.now
        facts = read_local_state(self.node, now.boottime)
        listed = [device.bus for device in self.devices.devices or ()]
        over = self.book.tick(frames, facts, now, driver_cards=listed)
        self.folder.write_sample(sample_text(self.book, now))
        self.folder.write_finished(over, self.node.boot_id, now)
        self.folder.write_inventory(self.book.devices, self.node.boot_id)
        return take_snapshot(self.book, self.devices.devices, facts, now, ExporterHealth("0.1.0"))

    def second(self, count: int = 4, busy: float = 0.5) -> NodeSnapshot:
        """Let a second pass, with a frame."""
        self.seconds += 1
        cards = [card(n, busy=busy, uuid=f"GPU-{n:08d}-aaaa", processes=[]) for n in range(count)]
        return self.tick(Frame(1, self.now.boottime, self.now.wall, "580", cards))


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Return a node of four GPUs of which five are expected, two of them claimed."""
    found = Box(tmp_path, gpus=4, EXPECTED_GPUS="5")
    found.node().store.check(make=True)
    node = found.node()
    boot.begin_boot(node.store, node.settings.state_dir, node.boot_id, node.name)
    place_lock(node.store, bus(0), record(token=A))
    place_lock(node.store, bus(1), record(token=B))
    quarantine.write_device_note(str(found.state), quarantine.QUARANTINE, bus(2), "root", "ECC")
    verdicts.write_verdicts(
        str(found.lock), {A: Verdict(ALIVE, ""), B: Verdict(DEAD, "gone")}, BOOT
    )
    return found


def test_the_states_are_those_that_status_shows(box: Box) -> None:
    snapshot = Exporter(box).second()
    shown = {row.id: row.state for row in view_node(box.node(), judging=False).rows()}
    told = {one.id: one.state for one in snapshot.devices}
    assert told == {name: state for name, state in shown.items() if name != "missing-0"}
    assert list(told.values()) == ["held", "stale", "quarantined", "free"]
    assert snapshot.states is not None
    assert snapshot.states["missing"] == 1


def test_while_the_driver_is_silent_the_last_known_state_and_the_models_are_told(box: Box) -> None:
    box.proc.add(78)
    exporter = Exporter(box)
    frame = Frame(1, exporter.now.boottime, exporter.now.wall, devices=[card(3)], complete=True)
    frame.devices[0].processes = [Process(78)]
    frame.devices += [card(0), card(1)]
    snapshot = exporter.tick(frame)
    before = {one.id: one.state for one in snapshot.devices}
    assert (before[bus(2)], before[bus(3)]) == ("missing", "foreign")
    exporter.seconds += 60
    snapshot = exporter.tick()
    assert not snapshot.health.nvml_up
    assert {one.id: one.state for one in snapshot.devices} == before
    assert {one.name for one in snapshot.devices if one.id != bus(2)} == {card(0).name}
    box.proc.remove(78)
    exporter.seconds += 1
    after = {one.id: one.state for one in exporter.tick().devices}
    assert after == {**before, bus(3): "free"}
