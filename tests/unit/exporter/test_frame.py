# SPDX-License-Identifier: Apache-2.0
"""What can be true of a device, and what is dropped before it is believed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from gpulock_exporter.frame import (
    COLLECTORS,
    DeviceTelemetry,
    Frame,
    FrameError,
    Process,
    decode_frame,
    encode_frame,
    normalize_bus_id,
)

from tests.support.exporter_nodes import card, full_card, instance
from tests.support.trees import bus


def decoded(*devices: DeviceTelemetry, **more: Any) -> Frame:
    """Return a frame of these devices as it comes out of its line."""
    return decode_frame(encode_frame(Frame(1.0, devices=list(devices), **more)))


def cleaned(device: DeviceTelemetry) -> DeviceTelemetry:
    """Return a device as it comes out of a frame."""
    (found,) = decoded(device).devices
    return found


def test_what_a_sound_card_says_is_all_believed() -> None:
    whole = full_card(processes=[Process(5, 100), Process(8)], links={bus(1): 4, "switch": 6})
    frame = Frame(100.5, "580.1", [whole, DeviceTelemetry(bus(2), "GPU-2", 1)])
    line = encode_frame(frame)
    assert line.endswith(b"}\n") and line.count(b"\n") == 1
    assert decode_frame(line) == frame


@pytest.mark.parametrize(
    ("told", "collector"),
    [
        ({"utilization": 9.0}, "utilization"),
        ({"memory_utilization": -1.0}, "utilization"),
        ({"observed": math.nan}, "utilization"),
        ({"memory_used": 90 * 2**30}, "memory"),
        ({"memory_total": 0}, "memory"),
        ({"power": 4294967.295}, "power"),
        ({"temperature": 4294967295.0}, "temperature"),
        ({"memory_clock": math.inf}, "clocks"),
        ({"clock_reason_seconds": {"board_limit": -1.0}}, "clocks"),
        ({"ecc": {"corrected.dram": 1, "uncorrected.dram": -1}}, "ecc"),
        ({"remapped": {"correctable": 2**60}}, "remapped"),
        ({"ecc": {"uncorrected.sram": 0xFFFFFFFF}}, "ecc"),
        ({"recovery_action": 99}, "remapped"),
        ({"recovery_action": 8}, "remapped"),
        ({"gpm": {"sm_active": 9.0}}, "gpm"),
        ({"links": {bus(1): -4}}, "devices"),
        ({"minor": -1}, "devices"),
        ({"uuid": "GPU-????"}, "devices"),
        ({"bus": "x"}, "devices"),
    ],
)
def test_an_impossible_value_is_a_failure_of_its_source(
    told: dict[str, Any], collector: str
) -> None:
    frame = decoded(full_card(1), full_card(0, **told))
    assert list(frame.failures) == [collector]
    assert collector in COLLECTORS
    ((field, value),) = told.items()
    assert field in frame.failures[collector]
    assert value not in [getattr(one, field) for one in frame.devices]


def test_a_failure_that_the_driver_told_is_not_forgotten_for_one_of_ours() -> None:
    frame = decoded(card(power=-1.0), failures={"power": "Unknown Error"})
    assert frame.failures == {"power": "Unknown Error"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("00010000:3B:00.0", "10000:3b:00.0"),
        ("", ""),
        ("0000:3b:00.0\n", ""),
        ("../../etc", ""),
        ("0000:3b:00.9", ""),
    ],
)
def test_a_bus_id_is_written_as_the_kernel_does(text: str, expected: str) -> None:
    assert normalize_bus_id(text) == expected


@pytest.mark.parametrize(
    "nameless",
    [
        card(bus="?"),
        card(bus="../x"),
        instance(0, 9999),
        instance(0, 1, ci=-1),
        instance(0, 1, parent="x"),
    ],
)
def test_a_device_that_cannot_be_named_is_none(nameless: Any) -> None:
    frame = decoded(nameless)
    assert (frame.devices, list(frame.failures)) == ([], ["devices"])


@pytest.mark.parametrize("text", ["GPU-????????-????", "a b", "x" * 200, 'GPU-"', "GPU-\n", "-"])
def test_a_uuid_that_is_none_is_not_told(text: str) -> None:
    clean = cleaned(card(uuid=text))
    assert clean.uuid == ""


def test_names_that_would_spoil_a_file_or_a_label_are_left_out() -> None:
    names = ["sw_power_cap", "a b", "A", "x=y", "", "n\n", "x" * 65]
    clean = cleaned(
        card(
            clock_reasons=names,
            ecc=dict.fromkeys(names, 1),
            gpm={"sm_active": 9.0, "tensor_active": 0.5, "dram_active": math.nan},
        )
    )
    assert clean.clock_reasons == ["sw_power_cap"]
    assert clean.ecc == {"sw_power_cap": 1}
    assert clean.gpm == {"tensor_active": 0.5}


def test_there_are_no_more_names_than_cards_have() -> None:
    names = [f"n{number}" for number in range(1000)]
    clean = cleaned(card(ecc=dict.fromkeys(names, 1), clock_reasons=names))
    assert (len(clean.ecc or {}), len(clean.clock_reasons or ())) == (64, 64)


def test_processes_that_cannot_be_are_left_out_and_each_is_there_once() -> None:
    listed = [Process(5, 1), Process(0), Process(-1), Process(2**31), Process(5, 2), Process(6, -1)]
    clean = cleaned(card(processes=listed))
    assert clean.processes == [Process(5, 2), Process(6, None)]


def test_text_is_held_to_a_line_and_a_length() -> None:
    clean = cleaned(card(name="a\nb" + "x" * 500))
    assert clean.name.startswith("a?b")
    assert len(clean.name) == 128


def test_of_two_devices_of_one_place_the_first_counts() -> None:
    frame = decoded(card(0, power=1.0), card(0, power=2.0), card(bus="x"))
    assert [one.power for one in frame.devices] == [1.0]


def test_a_frame_has_so_many_devices_at_most() -> None:
    many = [card(bus=f"{number:04x}:01:00.0") for number in range(3000)]
    assert len(decoded(*many).devices) == 1024


def test_of_lost_cards_those_count_that_can_be_named_and_so_many_at_most() -> None:
    lost = {"x": "?", "0000:3B:00.0": "fell\noff"}
    assert decoded(lost=lost).lost == {"0000:3b:00.0": "fell?off"}
    assert len(decoded(lost={f"{n:04x}:01:00.0": "" for n in range(3000)}).lost) == 1024


def test_what_a_frame_says_besides_its_devices_is_text_or_what_it_must_be() -> None:
    line = b'{"boottime":1,"driver":5,"devices":[],"failures":{"power":[1]},"lost":{},"complete":1}'
    frame = decode_frame(line)
    assert (frame.driver, frame.failures, frame.complete) == ("5", {"power": "[1]"}, False)
    assert len(decoded(card(uuid="x y" * 1000)).failures["devices"]) < 200


def with_device(**fields: Any) -> bytes:
    """Return a frame of one device of which some fields are others."""
    one = DeviceTelemetry("0000:3b:00.0", "GPU-1", 0)
    raw = json.loads(encode_frame(Frame(1.0, devices=[one])))
    raw["devices"][0].update(fields)
    return json.dumps(raw).encode()


def test_a_whole_number_will_do_for_a_real_one() -> None:
    (device,) = decode_frame(with_device(energy=5, gpm={"sm_active": 1}, utilization=None)).devices
    assert repr((device.energy, device.gpm)) == "(5.0, {'sm_active': 1.0})"
    assert device.utilization is None


@pytest.mark.parametrize(
    ("fields", "collector"),
    [
        ({"index": True}, "devices"),
        ({"index": 1.0}, "devices"),
        ({"mig": 1}, "mig"),
        ({"utilization": "0.5"}, "utilization"),
        ({"utilization": True}, "utilization"),
        ({"memory_used": 0.5}, "memory"),
        ({"ecc": []}, "ecc"),
        ({"ecc": {"corrected.dram": 0.5}}, "ecc"),
        ({"ecc": {"corrected.dram": None}}, "ecc"),
        ({"gpm": {"sm_active": "all"}}, "gpm"),
        ({"clock_reasons": {"gpu_idle": 1}}, "clocks"),
        ({"clock_reasons": [1]}, "clocks"),
        ({"energy": 10**400}, "power"),
    ],
)
def test_a_value_of_another_type_is_not_known_and_its_collector_has_failed(
    fields: dict[str, Any], collector: str
) -> None:
    frame = decode_frame(with_device(**fields))
    (name,) = fields
    assert list(frame.failures) == [collector]
    assert not getattr(frame.devices[0], name)


@pytest.mark.parametrize(
    "fields",
    [
        {"bus": 1},
        {"bus": None},
        {"name": 1},
        {"processes": [7]},
        {"processes": [{"memory": 5}]},
    ],
)
def test_what_names_a_device_or_a_process_and_is_no_name_is_no_frame(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(FrameError):
        decode_frame(with_device(**fields))


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b"null", b'{"boottime":1', b"[" * 100_000])
def test_a_line_that_is_no_frame_is_none(line: bytes) -> None:
    with pytest.raises(FrameError):
        decode_frame(line)
