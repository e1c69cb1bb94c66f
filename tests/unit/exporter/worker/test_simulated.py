# SPDX-License-Identifier: Apache-2.0
"""The telemetry of a simulated node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpulock_exporter.frame import DeviceTelemetry, Frame, decode_frame, encode_frame
from gpulock_exporter.worker.simulated import SimulatedSource

from gpulock.simulate.node import SimulatedNode, write_simulated_node
from gpulock.simulate.presets import PRESETS
from gpulock.store.locks import LockStore
from tests.support.locks import end_lock, place_lock
from tests.support.trees import record

START = 50_000.0


class Scene:
    """A node, a source that looks at it, and a clock."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.now = START
        self.source = SimulatedSource(str(node.directory), lambda: self.now)
        self.source.open()
        self.source.collect(False)

    def look(self, after: float = 1.0, *, processes: bool = False) -> Frame:
        self.now += after
        frame = self.source.collect(processes)
        assert decode_frame(encode_frame(frame)) == frame
        return frame

    def hold(self, lock_id: str, **changes: Any) -> None:
        own = {"scheduler": "process", "pid": 4711, "token": f"t{lock_id}", **changes}
        place_lock(LockStore(str(self.node.lock_dir)), lock_id, record(**own, devices=(lock_id,)))

    def free(self, lock_id: str) -> None:
        end_lock(LockStore(str(self.node.lock_dir)), lock_id)

    def script(self, text: str) -> None:
        (self.node.directory / "telemetry").write_text(text)


@pytest.fixture
def stage(tmp_path: Path) -> Callable[[str], Scene]:
    return lambda preset: Scene(write_simulated_node(tmp_path / "node", preset))


def card(frame: Frame, bus: str) -> DeviceTelemetry:
    return next(one for one in frame.devices if one.bus == bus and one.gi is None)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_devices_are_those_of_the_drivers_files(
    stage: Callable[[str], Scene], preset: str
) -> None:
    frame, machine = stage(preset).look(), PRESETS[preset]
    cards = [one for one in frame.devices if one.gi is None]
    assert [(one.bus, one.uuid, one.minor, one.index) for one in cards] == [
        (gpu.bus, machine.uuid(gpu), gpu.minor, index) for index, gpu in enumerate(machine.gpus)
    ]
    assert (f" {frame.driver} " in machine.driver, frame.failures) == (True, {})
    parts = [(one.bus, one.gi, one.ci, one.profile) for one in frame.devices if one.gi is not None]
    assert parts == [
        (gpu.bus, part.gi, part.ci, part.profile) for gpu in machine.gpus for part in gpu.mig
    ]


def test_a_device_works_for_its_holder_or_for_each_on_a_place(
    stage: Callable[[str], Scene],
) -> None:
    scene = stage("dgx1")
    scene.hold("0000:06:00.0")
    scene.hold("0000:07:00.0.share1", pid=71, places=2)
    scene.hold("0000:07:00.0.share2", pid=72, places=2)
    scene.hold("0000:0a:00.0", scheduler="admin")
    before = scene.look()
    frame = scene.look(30, processes=True)
    whole, shared, reserve = (card(frame, f"0000:{bus}:00.0") for bus in ("06", "07", "0a"))
    for one in (whole, shared):
        assert 0.2 < (one.utilization or 0) < 1 and one.busy == pytest.approx(16, rel=0.8)
        assert (one.power or 0) > (reserve.power or 0)
    assert list(whole.processes or ()) == [4711]
    shares = shared.processes or {}
    assert {pid: (memory or 0) > 0 for pid, memory in shares.items()} == {71: True, 72: True}
    assert (reserve.utilization, reserve.busy, reserve.observed) == (0, 0, 16)
    assert (reserve.memory_used, reserve.processes) == (0, {})
    scene.free("0000:06:00.0")
    after = scene.look()
    assert card(after, whole.bus).utilization == 0
    for counter in ("energy", "pcie_receive", "nvlink_transmit"):
        told = [getattr(card(one, shared.bus), counter) for one in (before, frame, after)]
        assert 0 < told[0] < told[1] < told[2], counter


def test_a_file_says_who_is_idle_and_who_is_foreign(stage: Callable[[str], Scene]) -> None:
    scene = stage("dgx1")
    for lock_id in ("0000:06:00.0", "0000:07:00.0"):
        scene.hold(lock_id)
    scene.script("idle=0000:06:00.0\nforeign=0000:0a:00.0:99\n")
    frame = scene.look(10, processes=True)
    idle, busy, foreign = (card(frame, f"0000:{bus}:00.0") for bus in ("06", "07", "0a"))
    assert idle.busy == 0
    assert idle.processes == {}
    assert (busy.busy or 0) > 0
    assert (foreign.busy or 0) > 0
    assert list(foreign.processes or ()) == [99]
    scene.script("no pairs")
    assert card(scene.look(), "0000:06:00.0").busy != 0


def test_a_folder_that_is_no_simulated_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no settings file"):
        SimulatedSource(str(tmp_path)).open()
    (tmp_path / "gpulock.conf").write_text("")
    with pytest.raises(RuntimeError, match="is no simulated node"):
        SimulatedSource(str(tmp_path)).open()
    scene = Scene(write_simulated_node(tmp_path / "node", "workstation"))
    (scene.node.driver_root / "version").unlink()
    with pytest.raises(RuntimeError, match="the simulated driver is gone"):
        scene.look()
