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
    whole = full_card(processes={5: 100, 8: None}, links={bus(1): 4, "switch": 6})
    frame = Frame(100.5, "580.1", [whole, DeviceTelemetry(bus(2), "GPU-2", 1)])
    line = encode_frame(frame)
    assert line.endswith(b"}\n") and line.count(b"\n") == 1
    assert decode_frame(line) == frame


@pytest.mark.parametrize(
    ("told", "collector"),
    [
        ({"utilization": 9.0}, "utilization"),
        ({"observed": math.nan}, "utilization"),
        ({"memory_used": 90 * 2**30}, "memory"),
        ({"memory_total": 0}, "memory"),
        ({"power": 4294967.295}, "power"),
        ({"clock_reason_seconds": {"board_limit": -1.0}}, "clocks"),
        ({"ecc": {"corrected.dram": 1, "uncorrected.dram": -1}}, "ecc"),
        ({"ecc": {"uncorrected.sram": 0xFFFFFFFF}}, "ecc"),
        ({"recovery_action": 8}, "remapped"),
        ({"links": {bus(1): -4}}, "devices"),
        ({"minor": -1}, "devices"),
        *[({"uuid": text}, "devices") for text in ("GPU-????", "a b", "x" * 200, "GPU-\n", "-")],
        ({"bus": "x"}, "devices"),
        # of another type
        ({"index": True}, "devices"),
        ({"mig": 1}, "mig"),
        ({"utilization": True}, "utilization"),
        ({"ecc": 5}, "ecc"),
        ({"clock_reasons": {"gpu_idle": 1}}, "clocks"),
        ({"energy": 10**400}, "power"),
    ],
)
def test_an_impossible_value_is_a_failure_of_its_source(
    told: dict[str, Any], collector: str
) -> None:
    frame = decoded(full_card(1), full_card(0, **told))
    assert list(frame.failures) == [collector]
    assert collector in COLLECTORS
    ((field, value),) = told.items()
    assert field in frame.failures[collector] and len(frame.failures[collector]) < 200
    assert value not in [getattr(one, field) for one in frame.devices[1:]]


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
    "nameless", [card(bus="../x"), card(index=-1), instance(0, 9999), instance(0, 1, ci=-1)]
)
def test_a_device_that_cannot_be_named_is_none(nameless: Any) -> None:
    frame = decoded(nameless)
    assert (frame.devices, list(frame.failures)) == ([], ["devices"])


def test_names_and_numbers_that_would_spoil_a_file_or_a_label_are_left_out() -> None:
    names = ["a.b", "a b", "A", "x=y", "", "n\n", "x" * 65]
    ratios = {"sm_active": 9.0, "tensor_active": 0.5, "dram_active": math.nan}
    clean = cleaned(card(ecc=dict.fromkeys(names, 1), gpm=ratios))
    assert (clean.ecc, clean.gpm) == ({"a.b": 1}, {"tensor_active": 0.5})
    many = cleaned(card(ecc={f"n{number}": 1 for number in range(1000)}))
    assert len(many.ecc or {}) == 64, "no card has more"
    clean = cleaned(card(processes={0: 1, -1: 1, 2**31: 1, 5: 2, 6: -1}, energy=5))
    assert (clean.processes, repr(clean.energy)) == ({5: 2, 6: None}, "5.0")
    assert cleaned(card(name="a\nb" + "x" * 500)).name == "a?b" + "x" * 125


def test_of_lost_cards_those_count_that_can_be_named_and_of_all_so_many_at_most() -> None:
    lost = {"x": "?", "0000:3B:00.0": "fell\noff" + "x" * 500}
    assert decoded(lost=lost).lost == {"0000:3b:00.0": "fell?off" + "x" * 120}
    many = [f"{number:04x}:01:00.0" for number in range(3000)]
    frame = decoded(*(card(bus=one) for one in many), lost=dict.fromkeys(many, ""))
    assert (len(frame.devices), len(frame.lost)) == (1024, 1024)


def test_what_a_frame_says_besides_its_devices_is_text_or_what_it_must_be() -> None:
    line = b'{"boottime":1,"driver":5,"devices":[],"failures":{"power":[1]},"lost":{},"complete":1}'
    frame = decode_frame(line)
    assert (frame.driver, frame.failures, frame.complete) == ("5", {"power": "[1]"}, False)


GOOD = json.loads(encode_frame(Frame(1.0, devices=[card()])))


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[]", b"{}", b"null", b'{"boottime":1', b"[" * 100_000),
        *(
            json.dumps({**GOOD, "devices": [{**GOOD["devices"][0], **wrong}]}).encode()
            for wrong in ({"bus": 1}, {"bus": None}, {"name": 1}, {"processes": {"x": 7}})
        ),
    ],
)
def test_a_line_that_is_no_frame_is_none(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a frame"):
        decode_frame(line)
