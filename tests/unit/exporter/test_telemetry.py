# SPDX-License-Identifier: Apache-2.0
"""What crosses the pipe from the worker: it comes out as it went in, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpulock_exporter.frame_decoder import decode_frame
from gpulock_exporter.telemetry import (
    DeviceTelemetry,
    Frame,
    FrameError,
    Process,
    encode_frame,
)

WHOLE = DeviceTelemetry(
    "0000:3b:00.0",
    "GPU-1",
    0,
    minor=3,
    name="NVIDIA H200",
    mig=False,
    persistence=True,
    utilization=0.5,
    busy=0.25,
    observed=1.0,
    memory_used=1 << 30,
    energy=1e6,
    clock_reasons=["gpu_idle"],
    clock_reason_seconds={"board_limit": 0.5},
    ecc={"corrected.dram": 1},
    gpm={"sm_active": 0.75},
    processes=[Process(7, 1 << 20), Process(8)],
    links={"switch": 18},
)
FRAME = Frame(
    7,
    100.5,
    1e9,
    "580.1",
    [WHOLE, DeviceTelemetry("0000:5e:00.0", "GPU-2", 1)],
    {},
    {},
)


def with_device(**fields: Any) -> bytes:
    """Return a frame of one device of which some fields are others."""
    one = DeviceTelemetry("0000:3b:00.0", "GPU-1", 0)
    raw = json.loads(encode_frame(Frame(1, 1.0, 2.0, devices=[one])))
    raw["devices"][0].update(fields)
    return json.dumps(raw).encode()


def test_a_frame_comes_out_as_it_went_in() -> None:
    line = encode_frame(FRAME)
    assert line.endswith(b"}\n") and line.count(b"\n") == 1
    assert decode_frame(line) == FRAME


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
        {"process_use": {"1": "all"}},
        {"process_use": {"x": 0.5}},
    ],
)
def test_what_names_a_device_or_a_process_and_is_no_name_is_no_frame(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(FrameError):
        decode_frame(with_device(**fields))


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b"null", b'{"sequence":1', b"[" * 100_000])
def test_a_line_that_is_no_frame_is_none(line: bytes) -> None:
    with pytest.raises(FrameError):
        decode_frame(line)
