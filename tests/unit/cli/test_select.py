# SPDX-License-Identifier: Apache-2.0
"""What an argument means: a device, a job, a process."""

from __future__ import annotations

import pytest

from gpulock.cli.select import (
    SelectError,
    Subject,
    match_device_list,
    match_devices,
    match_one_device,
    parse_subject,
    resolve_lock_id,
)
from gpulock.node.devices import Device
from gpulock.store.owner import Owner


def gpu(bus: str, index: int, uuid: str, instance: str = "") -> Device:
    device = Device(f"{bus}.{instance}" if instance else bus, index)
    device.uuid = uuid
    return device


NODE = [
    gpu("0000:06:00.0", 0, "GPU-a8bb20c6-54c9"),
    gpu("0000:3b:00.0", 1, "GPU-a8bb20c7-1111"),
    gpu("0000:86:00.0", 2, "MIG-11111111-0001", "gi1.ci0"),
    gpu("0000:86:00.0", 2, "MIG-22222222-0002", "gi10.ci0"),
]


def job(job_id: str, task: str = "1", scheduler: str = "sge") -> Owner:
    pid = int(job_id) if scheduler == "process" else 0
    return Owner(scheduler=scheduler, job_id=job_id, task_id=task, pid=pid)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("0", "0000:06:00.0"),
        *((text, "0000:3b:00.0") for text in ("0000:3b:00.0", "3b:00.0", "00000000:3B:00.0")),
        *((text, "0000:3b:00.0") for text in ("GPU-a8bb20c7", "gpu 1")),
        ("a8bb20c6-54c9", "0000:06:00.0"),
        ("2:gi1.ci0", "0000:86:00.0.gi1.ci0"),
        ("86:00.0.gi10.ci0", "0000:86:00.0.gi10.ci0"),
        ("86:00.0.gi1.ci0.share2", "0000:86:00.0.gi1.ci0"),
        ("MIG-2222", "0000:86:00.0.gi10.ci0"),
    ],
)
def test_a_device_is_named_by_index_bus_id_or_uuid(text: str, name: str) -> None:
    found = parse_subject(text, NODE).device
    assert found is not None and found.id == name


@pytest.mark.parametrize("text", ["2", "86:00.0", "GPU-a8bb20c"])
def test_what_may_be_several_devices_is_refused_with_their_names(text: str) -> None:
    with pytest.raises(SelectError, match="several devices"):
        match_one_device(text, NODE)


@pytest.mark.parametrize(
    "text", ["GPU-a8b", "a8bb2", "7", "07:00.0", "", "gpu", "3b:00.1", "GPU-.*.*", "GPU-(((("]
)
def test_what_is_too_short_or_not_there_is_no_device(text: str) -> None:
    assert match_devices(text, NODE) == []
    with pytest.raises(SelectError, match="no device"):
        match_one_device(text, NODE)


@pytest.mark.parametrize(
    ("text", "own", "others"),
    [
        ("12", [job("12"), job("12", "7")], [job(n) for n in ("123", "112", "1", "2")]),
        ("12", [job("12")], [job("12", scheduler="admin"), job("")]),
        ("12.1", [job("12", "1")], [job("12", "11"), job("12", "10")]),
        ("4711", [job("4711")], [job("4711", scheduler="process")]),
        ("pid 4711", [job("4711", scheduler="process")], [job("4711")]),
    ],
)
def test_a_job_is_no_other_that_begins_so_and_no_process(
    text: str, own: list[Owner], others: list[Owner]
) -> None:
    what = parse_subject(text, NODE)
    assert all(map(what.owns, own)) and not any(map(what.owns, others))


def test_a_number_is_a_device_where_there_is_one_and_a_job_otherwise() -> None:
    assert parse_subject("1", NODE).device is NODE[1]
    assert parse_subject("9", NODE) == Subject(job="9")
    assert parse_subject("job 1", NODE) == Subject(job="1")


def test_what_the_driver_does_not_show_is_named_by_any_form_of_its_id() -> None:
    forms = ("3B:00.0", "3b:00.0.share1", "FF:00.0", "00000000:FF:00.0.gi3.ci0", "ff:00.0.share2")
    names = [
        "0000:3b:00.0",
        "0000:3b:00.0.share1",
        "0000:ff:00.0",
        "0000:ff:00.0.gi3.ci0",
        "0000:ff:00.0.share2",
    ]
    assert [resolve_lock_id(text, NODE) for text in forms] == names


def test_a_list_names_each_device_once() -> None:
    assert match_device_list("1, 06:00.0", NODE) == [NODE[1], NODE[0]]
    with pytest.raises(SelectError, match="twice"):
        match_device_list("1,3b:00.0", NODE)
