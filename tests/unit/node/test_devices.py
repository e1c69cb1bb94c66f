# SPDX-License-Identifier: Apache-2.0
"""The devices of a node as driver and kernel show them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.node import device_list, devices
from gpulock.node.devices import Device
from tests.support.faults import plant_fifo, plant_link, replace_text
from tests.support.trees import BOOT, OTHER_BOOT, Box


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path, gpus=0)


def read(box: Box) -> list[Device]:
    return box.node().devices()


def ids(box: Box) -> list[str]:
    return [device.id for device in read(box)]


def test_gpus_are_in_the_order_of_their_bus_not_of_its_text_and_named_in_lower_case(
    box: Box,
) -> None:
    """The index is CUDA's: in another order jobs get each other's cards."""
    for minor, slot in enumerate(("0000:10:00.0", "10000:01:00.0", "0001:00:00.0", "0000:9:1f.7")):
        box.gpu(slot, minor)
    box.gpu("0000:0A:00.0", 4)
    order = ["0000:9:1f.7", "0000:0a:00.0", "0000:10:00.0", "0001:00:00.0", "10000:01:00.0"]
    assert ids(box) == order
    assert [(device.index, device.fault) for device in read(box)] == [(n, "") for n in range(5)]


def test_a_uuid_not_read_yet_is_taken_from_this_boots_inventory_only(box: Box) -> None:
    box.gpu("0000:3b:00.0", 0, "GPU-????????-????-????-????-????????????")
    box.inventory("gpu.0000:3b:00.0.uuid=GPU-old", boot_id=OTHER_BOOT)
    assert read(box)[0].uuid == ""
    box.inventory("gpu.0000:3b:00.0.uuid=GPU-0123")
    assert read(box)[0].uuid == "GPU-0123"
    box.gpu("0000:43:00.0", 1, "GPU-4567")
    box.inventory("gpu.0000:43:00.0.uuid=GPU-old")
    assert read(box)[1].uuid == "GPU-4567"


def test_links_hold_both_ways_round(box: Box) -> None:
    box.inventory("link.0000:1b:00.0.0000:43:00.0=4")
    found = device_list.nvlink_counts(device_list.read_nvml_inventory(str(box.lock), BOOT))
    assert found["0000:1b:00.0", "0000:43:00.0"] == found["0000:43:00.0", "0000:1b:00.0"] == 4


@pytest.mark.parametrize("uuid", ["GPU-1,GPU-2", "MIG-1", "0", "\x1b[0m"])
def test_a_uuid_that_is_none_is_never_put_into_a_mask(box: Box, uuid: str) -> None:
    box.gpu("0000:3b:00.0", 0, uuid)
    found = read(box)[0]
    assert found.uuid == "" or found.fault


def test_a_card_that_vanishes_while_it_is_read_is_gone(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    for minor, slot in enumerate(["0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"]):
        box.gpu(slot, minor)
    real = os.open

    def fall_off(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path.endswith("0000:43:00.0/information"):
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", fall_off)
    assert [(d.id, d.index) for d in read(box)] == [("0000:1b:00.0", 0), ("0000:52:00.0", 1)]


SPOILERS: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(b"\xff\x00\xfe" * 50),
    lambda path: path.write_text(""),
    lambda path: os.truncate(path, 1 << 40),
    lambda path: replace_text(path, "0000:43", "0000:44"),
    lambda path: replace_text(path, "Device Minor: \t 1", "Device Minor: \t 1²"),
    plant_link,
    plant_fifo,
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_card_whose_file_is_no_information_keeps_its_place_and_is_not_granted(
    box: Box, spoil: Callable[[Path], object]
) -> None:
    for minor, slot in enumerate(["0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"]):
        box.gpu(slot, minor)
    spoil(box.driver / "gpus/0000:43:00.0/information")
    found = read(box)
    assert [(d.index, bool(d.fault)) for d in found] == [(0, False), (1, True), (2, False)]


@pytest.mark.parametrize("key", ["GPU Excluded", "Blacklisted"])
def test_an_excluded_card_has_no_index_and_shifts_nobodys(box: Box, key: str) -> None:
    box.gpu("0000:1b:00.0", 0)
    path = box.gpu("0000:43:00.0", 1)
    path.write_text(path.read_text().replace("GPU Excluded: \t No", f"{key}: \t Yes"))
    box.gpu("0000:52:00.0", 2)
    found = read(box)
    assert [(d.index, bool(d.fault)) for d in found] == [(0, False), (-1, True), (1, False)]


def test_what_is_no_bus_id_is_no_card(box: Box) -> None:
    box.gpu("0000:1b:00.0", 0)
    for name in ("README", "0000:1b", "a:b:c:d", "xyz:1b:00.0", "0000:1b:00.g", "::."):
        (box.driver / "gpus" / name).mkdir()
    assert ids(box) == ["0000:1b:00.0"]


MIG = (
    "gpu.0000:1b:00.0.mig=1",
    "mig.0000:1b:00.0.gi10.ci0.uuid=MIG-c",
    "mig.0000:1b:00.0.gi2.ci1.uuid=MIG-b",
    "mig.0000:1b:00.0.gi2.ci0.uuid=MIG-a",
    "mig.0000:1b:00.0.gi2.ci0.profile=3g.40gb",
    "mig.0000:1b:00.0.gi2.ci0.memory_mib=40192",
)


def test_a_card_in_mig_mode_without_instances_or_information_gives_nothing(box: Box) -> None:
    path = box.gpu("0000:1b:00.0", 0)
    box.inventory("gpu.0000:1b:00.0.mig=1")
    assert [(d.id, bool(d.withheld)) for d in read(box)] == [("0000:1b:00.0", True)]
    box.inventory(*MIG)
    assert [d.id[len("0000:1b:00.0.") :] for d in read(box)] == ["gi2.ci0", "gi2.ci1", "gi10.ci0"]
    path.write_text("garbage")
    assert [bool(d.fault) for d in read(box)] == [True] * 3


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("0000:1b:00.0", "0000:1b:00.0", True),
        ("0000:1b:00.0", "0000:1b:00.0.gi2.ci0", True),
        ("0000:1b:00.0.gi2.ci0", "0000:1b:00.0", True),
        ("0000:1b:00.0.gi2.ci0", "0000:1b:00.0.gi2.ci1", False),
        ("0000:1b:00.0.gi1.ci0", "0000:1b:00.0.gi11.ci0", False),
        ("0000:1b:00.0", "0000:1b:00.01", False),
        ("0000:1b:00.0", "0000:1b:00.1", False),
        ("0000:1b:00.0", "10000:1b:00.0", False),
        ("0000:1b:00.0", "0000:1b:00.0.share1", True),
        ("0000:1b:00.0.share1", "0000:1b:00.0.share2", False),
        ("0000:1b:00.0.share1", "0000:1b:00.0.share11", False),
        ("0000:1b:00.0.share1", "0000:1b:00.0.gi1.ci0", True),
        ("0000:1b:00.0.share1", "0000:1c:00.0.gi1.ci0", False),
    ],
)
def test_a_card_overlaps_its_parts_and_they_not_each_other_but_a_share_an_instance(
    a: str, b: str, same: bool
) -> None:
    assert devices.lock_ids_overlap(a, b) is devices.lock_ids_overlap(b, a) is same
