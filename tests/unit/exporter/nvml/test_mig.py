# SPDX-License-Identifier: Apache-2.0
"""MIG devices, on the double of NVML: A100 without GPM, H200 with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpulock_exporter.frame import DeviceTelemetry, Frame

from tests.nvml.double import ERROR_GPU_IS_LOST, ERROR_NO_PERMISSION, ERROR_UNKNOWN, Double, Process
from tests.support.exporter_nvml import Eye, device

CARD = "0000:07:00.0"


def instances(frame: Frame) -> list[DeviceTelemetry]:
    return [one for one in frame.devices if one.gi is not None]


def names(frame: Frame) -> list[str]:
    return [f"{one.lock_id} {one.profile}" for one in instances(frame)]


PAIR = ("3g.71gb", "3g.71gb")


def test_instances_are_devices_of_their_own_and_have_nothing_of_the_board(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="a100-mig", gpus=3) as nvml, Eye(nvml) as eye:
        nvml.set("gpu0.mig1.memory.used", "1G")
        eye.look()
        frame = eye.look()
    assert frame.failures == {}
    assert names(frame) == [
        "0000:07:00.0.gi2.ci0 3g.40gb",
        "0000:07:00.0.gi3.ci0 2g.20gb",
        "0000:07:00.0.gi9.ci0 1g.10gb",
        "0000:07:00.0.gi10.ci0 1g.10gb",
        "0000:0f:00.0.gi1.ci0 3g.40gb",
        "0000:0f:00.0.gi2.ci0 3g.40gb",
    ]
    one = instances(frame)[1]
    assert one.uuid.startswith("MIG-")
    assert one.name == "NVIDIA A100-SXM4-80GB"
    assert (one.memory_used, one.memory_total) == (1 << 30, 19968 << 20)
    told = {name for name, value in vars(one).items() if value not in (None, "")}
    assert told == {
        *("bus", "uuid", "index", "minor", "name", "gi", "ci", "profile", "numa"),
        *("memory_used", "memory_total"),
    }
    card = device(frame, 0)
    assert card.mig is True
    assert card.power == 62.0
    assert device(frame, 2).mig is False


def test_with_gpm_an_instance_is_busy_for_as_long_as_its_graphics_engine_is(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1) as nvml:
        nvml.split(0, PAIR)
        nvml.update({"gpu0.mig0.gpm.1": 60, "gpu0.mig0.gpm.2": 35, "gpu0.mig1.gpm.1": 0})
        nvml.update({"gpu0.pcie.tx_bytes": "6000", "gpu0.pcie.rx_bytes": "7000"})
        with Eye(nvml, stopped=True) as eye:
            first = instances(eye.look())
            assert [(one.utilization, one.busy) for one in first] == [(None, None)] * 2
            one, other = instances(eye.look(after=1.5))
            assert one.utilization == 0.6
            assert one.observed == pytest.approx(1.5)
            assert one.busy == pytest.approx(0.6 * (one.observed or 0))
            assert one.gpm is not None
            assert one.gpm["sm_active"] == 0.35
            assert (other.utilization, other.busy) == (0, 0)
            one, _ = instances(eye.look(after=0.3))
            assert (one.utilization, one.busy, one.observed) == (0.6, 0, 0), "no window has ended"
            card = device(eye.look())
            assert (card.gpm, card.pcie_transmit) == (None, 6000), "the card is not one device"
            nvml.set("gpu0.mig1.uuid", None)
            eye.look()
            assert nvml.calls()["nvmlGpmSampleFree"] == 2, "both of the instance that is gone"


def test_instances_go_on_after_a_look_at_which_their_card_was_lost(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1) as nvml:
        nvml.split(0, PAIR)
        with Eye(nvml, stopped=True) as eye:
            eye.look()
            nvml.set("gpu0.mig1.error.nvmlDeviceGetUUID", ERROR_GPU_IS_LOST)
            assert eye.look().devices == []
            nvml.set("gpu0.mig1.error.nvmlDeviceGetUUID", 0)
            assert [one.observed for one in instances(eye.look())] == [2.0, 2.0]


def test_two_that_share_a_gpu_instance_are_not_billed_for_each_other(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1) as nvml:
        nvml.split(0, (*PAIR, "3g.71gb"))
        nvml.update({"gpu0.mig1.gi": 1, "gpu0.mig1.ci": 1, "gpu0.mig2.gi": 2})
        nvml.update({f"gpu0.mig{n}.gpm.1": 60 for n in range(3)})
        with Eye(nvml) as eye:
            eye.look()
            found = instances(eye.look())
            assert [one.utilization for one in found] == [None, None, 0.6]


def test_a_card_that_is_split_and_joined_again_shows_at_once(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=2) as nvml, Eye(nvml) as eye:
        eye.look()
        assert device(eye.look()).gpm is not None
        nvml.split(0, PAIR)
        frame = eye.look()
        assert names(frame) == ["0000:1b:00.0.gi1.ci0 3g.71gb", "0000:1b:00.0.gi2.ci0 3g.71gb"]
        card = device(frame)
        assert (card.mig, card.utilization, card.links) == (True, None, None)
        assert device(eye.look(after=6)).remapped is None
        nvml.set("gpu0.mig0.uuid", None)
        assert names(eye.look()) == ["0000:1b:00.0.gi2.ci0 3g.71gb"], "a place may be free"
        nvml.reset()
        assert device(eye.look()).gpm is None, "a window begins anew"
        frame = eye.look(after=6)
        assert instances(frame) == []
        assert device(frame).remapped is not None
        card = device(frame)
        assert (card.mig, card.utilization, card.links) == (False, 0.0, {"switch": 18})
        assert card.gpm is not None
        assert frame.failures == {}


def test_a_handle_that_stands_for_another_instance_now_is_that_instance(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="a100-mig", gpus=1) as nvml, Eye(nvml) as eye:
        eye.look()
        uuid = "MIG-ffffffff-0000-0000-0000-000000000000"
        nvml.update(
            {"gpu0.mig0.uuid": uuid, "gpu0.mig0.gi": 5, "gpu0.mig0.name": "A100 MIG 1g.10gb"}
        )
        frame = eye.look()
        assert instances(frame)[0].uuid == uuid
        assert names(frame)[0] == f"{CARD}.gi5.ci0 1g.10gb"
        second = instances(frame)[1].uuid
        nvml.update({"gpu0.mig0.uuid": second, "gpu0.mig1.uuid": uuid})
        nvml.set("gpu0.mig1.memory.used", "1G")
        used = {one.uuid: one.memory_used for one in instances(eye.look())}
        assert used[uuid] == 1 << 30 != used[second], "it is asked by the handle that it has now"


def test_an_instance_that_fails_does_not_spoil_the_others(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="a100-mig", gpus=1) as nvml, Eye(nvml) as eye:
        eye.look()
        nvml.set("gpu0.mig2.error.nvmlDeviceGetUUID", ERROR_UNKNOWN)
        frame = eye.look()
        assert len(instances(frame)) == 3
        assert frame.failures == {"mig": f"{CARD}: Unknown Error"}
        nvml.set("gpu0.mig2.error.nvmlDeviceGetUUID", 0)
        nvml.fail("nvmlDeviceGetMigMode", ERROR_UNKNOWN)
        assert len(instances(eye.look())) == 4, "that it cannot be asked for is no change of mode"


def test_the_processes_of_an_instance_are_its_own(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="a100-mig", gpus=1) as nvml, Eye(nvml) as eye:
        nvml.processes(
            0,
            [
                Process(11, "1M", "C", (2, 0)),
                Process(12, "1M", "C", (9, 0)),
                Process(13, "1M", "C", (9, 0)),
            ],
        )
        frame = eye.look(processes=True)
        found = {one.gi: list(one.processes or ()) for one in instances(frame)}
        assert found == {2: [11], 3: [], 9: [12, 13], 10: []}
        assert device(frame).processes is None
        nvml.fail("nvmlDeviceGetComputeRunningProcesses*", ERROR_NO_PERMISSION)
        frame = eye.look(processes=True)
        assert [one.processes for one in instances(frame)] == [None] * 4
        assert "Insufficient Permissions" in frame.failures["processes"]
