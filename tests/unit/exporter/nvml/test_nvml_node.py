# SPDX-License-Identifier: Apache-2.0
"""Cards that come and go, drivers that fail: what a look makes of a node that is not well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpulock_exporter.frame import Frame

from tests.nvml.double import ERROR_DRIVER_NOT_LOADED, ERROR_NO_PERMISSION, ERROR_UNKNOWN, Double
from tests.support.exporter_nvml import Eye, device

pytestmark = pytest.mark.slow

FIRST, SECOND, THIRD = "0000:06:00.0", "0000:07:00.0", "0000:0a:00.0"
VERSION_MISMATCH = 18
INITIALISED = "nvmlInitWithFlags"


def buses(frame: Frame) -> list[str]:
    return [one.bus for one in frame.devices]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (INITIALISED, ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded; load the driver"),
        (INITIALISED, ERROR_NO_PERMISSION, "Insufficient Permissions; let this user open"),
        (INITIALISED, VERSION_MISMATCH, "version mismatch.; the driver was replaced"),
        (INITIALISED, ERROR_UNKNOWN, "Unknown Error; look at nvidia-smi"),
        ("nvmlDeviceGetCount_v2", ERROR_UNKNOWN, "Unknown Error; look at nvidia-smi"),
    ],
)
def test_no_driver_is_said_in_its_words_with_what_to_do(
    tmp_path: Path, call: str, error: int, words: str
) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml:
        nvml.fail(call, error)
        with pytest.raises(RuntimeError, match=re.escape(words)), Eye(nvml):
            pass
        assert not nvml.held()


def test_a_lost_card_is_left_out_looked_for_now_and_then_and_disturbs_no_other(
    tmp_path: Path,
) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=3) as nvml, Eye(nvml, stopped=True) as eye:
        eye.look(after=3600)  # however long NVML was open
        nvml.lose(1)
        before = nvml.calls()
        for _ in range(60):
            frame = eye.look(after=2)
            assert (buses(frame), frame.lost) == ([FIRST, THIRD], {SECOND: "GPU is lost"})
            assert frame.failures == {"devices": f"{SECOND}: GPU is lost"}
            assert frame.complete and device(frame, 2).power == 43.0
        assert (nvml.calls() - before)[INITIALISED] == 0
        for _ in range(3):
            eye.look()
        assert (nvml.calls() - before)[INITIALISED] == 1
        nvml.reset()
        eye.look(after=130)
        frame = eye.look()
        assert (buses(frame), frame.failures) == ([FIRST, SECOND, THIRD], {})
        nvml.lose(0)
        nvml.fail("nvmlDeviceGetUUID", 0, gpu=0)
        frame = eye.look()
        assert frame.failures == {"devices": f"{FIRST}: GPU is lost"}, "though its UUID is known"
        nvml.reset()
        assert buses(eye.look()) == [FIRST, SECOND, THIRD], "at once"


def test_a_card_that_was_lost_from_the_start_is_looked_for_again(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml:
        nvml.lose(0)
        with Eye(nvml) as eye:
            frame = eye.look()
            assert frame.failures == {"devices": "card 0: GPU is lost"}
            nvml.reset()
            assert buses(eye.look()) == [SECOND], "that costs an initialisation"
            eye.look(after=130)
            assert buses(eye.look()) == [FIRST, SECOND]


def test_a_card_off_the_bus_shows_at_once_moves_no_neighbour_and_ends_no_samples(
    tmp_path: Path,
) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=3) as nvml, Eye(nvml) as eye:
        moment = 1_700_000_000_000_000
        nvml.samples(0, [(moment, 50)])
        uuid = device(eye.look(), 2).uuid
        nvml.samples(0, [(moment, 50), (moment + 500_000, 50)])
        nvml.set("gpu1.gone", 1)
        frame = eye.look(after=6)
        assert buses(frame) == [FIRST, THIRD]
        assert (frame.devices[1].uuid, frame.devices[1].index) == (uuid, 1)
        assert (device(frame).busy, device(frame).observed) == (0.25, 0.5)
        nvml.set("gpu1.gone", 0)
        assert buses(eye.look(after=6)) == [FIRST, SECOND, THIRD]


def test_a_reloaded_driver_is_initialised_again(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml, Eye(nvml) as eye:
        eye.look()
        nvml.set("reload", 1)
        before = nvml.calls()
        frame = eye.look()
        assert (buses(frame), frame.failures) == ([FIRST, SECOND], {})
        assert (nvml.calls() - before)[INITIALISED] == 1
        assert (nvml.calls() - before)["nvmlShutdown"] == 1


def test_a_driver_that_is_gone_ends_the_look_and_may_come_back(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml, Eye(nvml) as eye:
        eye.look()
        nvml.fail("nvmlDevice*", ERROR_UNKNOWN)
        nvml.fail("nvmlInit*", ERROR_DRIVER_NOT_LOADED)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Driver Not Loaded; load the driver"):
                eye.look()
        assert not nvml.held()
        nvml.reset()
        assert buses(eye.look()) == [FIRST]


def test_a_card_that_changes_its_uuid_is_another_card_and_lost_until_it_answers(
    tmp_path: Path,
) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml, Eye(nvml) as eye:
        moment = 1_700_000_000_000_000
        nvml.samples(0, [(moment, 50)])
        eye.look()
        nvml.samples(0, [(moment, 50), (moment + 500_000, 50)])
        nvml.set("gpu0.uuid", "GPU-00000000-0000-0000-0000-00000000c0de")
        nvml.fail("nvmlDeviceGetPciInfo*", ERROR_UNKNOWN, gpu=0)
        frame = eye.look()
        assert (buses(frame), frame.lost) == ([SECOND], {FIRST: "Unknown Error"})
        nvml.fail("nvmlDeviceGetPciInfo*", 0, gpu=0)
        frame = eye.look()
        assert device(frame).uuid == "GPU-00000000-0000-0000-0000-00000000c0de"
        assert device(frame).observed == 0, "what was measured before was another card's"
        assert (buses(frame), frame.failures) == ([FIRST, SECOND], {})


def test_where_a_card_may_not_be_opened_a_frame_is_not_of_all_there_are(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2) as nvml:
        nvml.fail("nvmlDeviceGetPciInfo*", ERROR_NO_PERMISSION, gpu=1)
        with Eye(nvml) as eye:
            frame = eye.look()
            assert (buses(frame), frame.complete) == ([FIRST], False)


@pytest.mark.parametrize("driver", ["460.91.03", "580.82.07"])
def test_nvlinks_are_told_by_the_bus_ids_of_both_ends_and_read_once(
    tmp_path: Path, driver: str
) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", driver=driver) as nvml, Eye(nvml) as eye:
        frame = eye.look()
        assert device(frame).links == {
            "0000:07:00.0": 1,
            "0000:0a:00.0": 1,
            "0000:0b:00.0": 2,
            "0000:85:00.0": 2,
        }
        before = nvml.calls()
        eye.look(after=30)
        assert not [call for call in nvml.calls() - before if "NvLink" in call]


def test_a_card_without_a_uuid_or_with_a_name_that_is_no_text_is_told(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx1", gpus=1) as nvml:
        nvml.set("gpu0.uuid", None)
        nvml.control.write_bytes(nvml.control.read_bytes() + b"gpu0.name=Tesla \xff\xfe\n")
        with Eye(nvml) as eye:
            card = device(eye.look())
            assert (card.bus, card.uuid, card.name) == (FIRST, "", "")


EVERY_ERROR = (*range(1, 31), ERROR_UNKNOWN)
TREATED_APART = (1, 2, 3, 4, 6, 7, 9, 10, 13, 15, 16, 18, 25, 28, ERROR_UNKNOWN)
AT_START = frozenset({INITIALISED, "nvmlShutdown", "nvmlSystemGetDriverVersion"})


@pytest.mark.parametrize(
    "errors",
    [
        pytest.param(TREATED_APART, id="some"),
        pytest.param(EVERY_ERROR, id="all", marks=pytest.mark.soak),
    ],
)
def test_no_error_of_any_call_ends_a_look_but_one_of_the_count_of_cards(
    tmp_path: Path, errors: tuple[int, ...]
) -> None:
    with Double(tmp_path / "nvml", preset="a100-mig", gpus=2) as nvml, Eye(nvml) as eye:
        nvml.update({"gpu*.gpm": 1, "gpu1.mig.mode": 0})
        eye.look(processes=True)
        eye.look(processes=True, after=6)
        calls = sorted(nvml.calls().keys() - AT_START)
        ended: set[str] = set()
        for call in calls:
            for error in errors:
                nvml.fail(call, error)
                try:
                    frame = eye.look(processes=True, after=6)
                except RuntimeError:
                    ended.add(call)
                else:
                    ids = {(one.bus, one.gi, one.ci) for one in frame.devices}
                    assert len(ids) == len(frame.devices)
                nvml.fail(call, 0)
        eye.look(after=400)
        frame = eye.look(after=6)
    assert len(calls) > 30
    assert ended == {"nvmlDeviceGetCount_v2"}
    assert frame.failures == {}
    assert [one.gi is not None for one in frame.devices] == [False, *4 * [True], False]
