# SPDX-License-Identifier: Apache-2.0
"""XIDs by an event set that is never waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpulock_exporter.telemetry import Frame

from tests.nvml.double import ERROR_GPU_IS_LOST, ERROR_NOT_SUPPORTED, ERROR_UNKNOWN, Double
from tests.support.exporter_nvml import Eye, device

STORM = 0x200  # nvmlEventTypeSingleBitEccErrorStorm


def told(frame: Frame) -> list[tuple[str, int]]:
    return [(one.uuid, one.xid) for one in frame.xids]


def test_each_xid_is_told_once_with_its_card(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml, Eye(nvml) as eye:
        nvml.event(0, 48)
        frame = eye.look()
        first, second = device(frame, 0).uuid, device(frame, 1).uuid
        assert told(frame) == [], "from before our time"
        nvml.event(1, 79)
        nvml.event(0, 13)
        nvml.event(0, 13)
        nvml.event(0, 1, STORM)
        assert told(eye.look()) == [(second, 79), (first, 13), (first, 13)]
        assert told(eye.look()) == []


def test_a_look_does_not_wait_for_events(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml, Eye(nvml) as eye:
        for _ in range(100):  # of a second each, pytest would end them
            eye.look()


def test_the_xid_of_a_card_that_fell_off_the_bus_is_told(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml, Eye(nvml) as eye:
        uuid = device(eye.look(), 1).uuid
        nvml.lose(1)
        nvml.event(1, 79)
        assert told(eye.look()) == [(uuid, 79)]


@pytest.mark.parametrize("manner", ["lost", "not counted", "driver"])
def test_an_xid_that_waits_while_nvml_is_initialised_again_is_told(
    tmp_path: Path, manner: str
) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml, Eye(nvml, stopped=True) as eye:
        frame = eye.look()
        first, second = device(frame, 0).uuid, device(frame, 1).uuid
        if manner == "lost":
            nvml.lose(1)
            eye.look()
            eye.look(after=70)  # the next look initialises NVML
        elif manner == "not counted":
            nvml.set("gpu1.gone", 1)
        nvml.event(1, 48)
        nvml.event(0, 31)
        if manner == "driver":
            nvml.fail("nvmlDeviceGetCount_v2", ERROR_UNKNOWN)
            with pytest.raises(RuntimeError):
                eye.look()
            nvml.reset()
        before = nvml.calls()
        assert told(eye.look(after=6)) == [(second, 48), (first, 31)]
        assert (nvml.calls() - before)["nvmlInitWithFlags"] == 1
        assert told(eye.look()) == []


def test_a_failing_event_set_is_remade_less_and_less_often(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml, Eye(nvml) as eye:
        uuid = device(eye.look()).uuid
        before = nvml.calls()
        nvml.fail("nvmlEventSetWait*", ERROR_UNKNOWN)
        for _ in range(40):
            assert eye.look().failures == {"xid": "Unknown Error"}
        made = nvml.calls() - before
        assert 4 <= made["nvmlEventSetCreate"] <= 6
        assert made["nvmlEventSetFree"] == made["nvmlEventSetCreate"] + 1
        nvml.reset()
        eye.look(after=70)
        assert eye.look().failures == {}
        nvml.event(0, 31)
        assert told(eye.look()) == [(uuid, 31)]


def test_a_card_that_cannot_be_listened_to_does_not_silence_the_others(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=3) as nvml:
        nvml.fail("nvmlDeviceRegisterEvents", ERROR_GPU_IS_LOST, gpu=0)
        nvml.set("gpu1.events.supported", None)
        with Eye(nvml) as eye:
            frame = eye.look()
            assert frame.failures == {}
            nvml.event(2, 62)
            assert told(eye.look()) == [(device(frame, 2).uuid, 62)]


def test_a_card_that_spoils_an_event_set_does_not_silence_the_others(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=3) as nvml:
        nvml.fail("nvmlDeviceRegisterEvents", ERROR_UNKNOWN, gpu=1)
        with Eye(nvml) as eye:
            frame = eye.look()
            assert list(frame.failures) == ["xid"]
            assert frame.failures["xid"] == f"{device(frame, 1).bus}: Unknown Error"
            made = nvml.calls()
            nvml.event(0, 62)
            nvml.event(2, 63)
            uuids = [device(frame, number).uuid for number in range(3)]
            assert told(eye.look()) == [(uuids[0], 62), (uuids[2], 63)]
            assert nvml.calls()["nvmlEventSetCreate"] == made["nvmlEventSetCreate"] == 2

            nvml.event(2, 48)
            assert told(eye.look(after=70)) == [(uuids[2], 48)]
            tried = nvml.calls()
            assert tried["nvmlEventSetCreate"] == 3, (
                "the card alone is tried, with a set of its own"
            )
            nvml.reset()
            nvml.event(0, 13)
            assert told(eye.look(after=70)) == [(uuids[0], 13)]
            assert eye.look().failures == {}
            nvml.event(1, 79)
            nvml.event(0, 31)
            assert told(eye.look()) == [(uuids[1], 79), (uuids[0], 31)]
            freed = nvml.calls()
            assert freed["nvmlEventSetFree"] == freed["nvmlEventSetCreate"] - 1


def test_where_every_card_spoils_the_event_set_they_are_tried_again(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml:
        nvml.fail("nvmlDeviceRegisterEvents", ERROR_UNKNOWN)
        with Eye(nvml) as eye:
            uuid = device(eye.look(), 1).uuid
            assert list(eye.look().failures) == ["xid"]
            nvml.reset()
            eye.look(after=70)
            assert eye.look().failures == {}
            nvml.event(1, 79)
            assert told(eye.look()) == [(uuid, 79)]


def test_a_card_that_was_lost_is_listened_to_again(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml, Eye(nvml) as eye:
        uuid = device(eye.look(), 1).uuid
        nvml.lose(1)
        nvml.fail("nvmlEventSetWait*", ERROR_GPU_IS_LOST)
        eye.look()
        nvml.fail("nvmlEventSetWait*", 0)
        for _ in range(3):
            eye.look()  # with an event set of the other card
        nvml.reset()
        eye.look()
        eye.look()
        nvml.event(1, 74)
        assert told(eye.look()) == [(uuid, 74)]


def test_where_no_card_tells_of_events_none_is_asked_for(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml:
        nvml.set("gpu*.events.supported", None)
        with Eye(nvml) as eye:
            for _ in range(4):
                assert eye.look().failures == {}
            assert nvml.calls()["nvmlEventSetCreate"] == 1
            assert nvml.calls()["nvmlEventSetWait_v2"] == 0


def test_what_came_before_a_card_is_back_is_told(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml, Eye(nvml) as eye:
        uuid = device(eye.look()).uuid
        nvml.lose(1)
        eye.look()
        nvml.reset()
        nvml.event(0, 13)
        assert told(eye.look()) == [(uuid, 13)], "the look that finds the card again"
        nvml.event(0, 31)
        assert told(eye.look()) == [(uuid, 31)], "the next one makes the event set anew"
        nvml.event(0, 45)
        assert told(eye.look()) == [(uuid, 45)]


def test_where_there_are_no_events_none_is_missing(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml:
        nvml.fail("nvmlEventSetCreate", ERROR_NOT_SUPPORTED)
        with Eye(nvml) as eye:
            for _ in range(3):
                assert eye.look().failures == {}


def test_a_library_that_cannot_wait_for_events_is_a_failure(tmp_path: Path) -> None:
    hidden = ("nvmlEventSetWait", "nvmlEventSetWait_v2")
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1, hidden=hidden) as nvml, Eye(nvml) as eye:
        for _ in range(3):
            assert eye.look().failures == {"xid": "Function Not Found"}
        assert nvml.calls()["nvmlEventSetCreate"] == 1
