# SPDX-License-Identifier: Apache-2.0
"""SHARES: which cards have places, by index, UUID or bus id."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.node.settings import Settings
from gpulock.node.shares import count_places_by_card
from tests.support.trees import Box, bus


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("1:4", {bus(1): 4}),
        ("1:4 3:2", {bus(1): 4, bus(3): 2}),
        ("GPU-00000002-aaaa:8", {bus(2): 8}),
        ("gpu-00000002-AAAA:8", {bus(2): 8}),
        ("0000:03:00.0:8", {bus(2): 8}),
        ("00000000:03:00.0:8", {bus(2): 8}),
        ("9:4", {}),
        ("GPU-00000009-aaaa:4", {}),
        (f"2:4 {bus(2)}:3", {bus(2): 3}),
        ("", {}),
    ],
)
def test_a_card_is_named_by_index_uuid_or_bus_id(
    tmp_path: Path, words: str, places: dict[str, int]
) -> None:
    node = Box(tmp_path, SHARES=words).node()
    assert count_places_by_card(node.devices(), node.settings.shares) == places


def test_an_instance_of_mig_has_no_places(tmp_path: Path) -> None:
    box = Box(tmp_path, SHARES="0:4 1:4")
    box.inventory(f"gpu.{bus(0)}.mig=1", f"mig.{bus(0)}.gi1.ci0.uuid=MIG-1")
    node = box.node()
    assert count_places_by_card(node.devices(), node.settings.shares) == {bus(1): 4}


def test_a_card_named_by_uuid_keeps_its_places_where_another_is_gone(tmp_path: Path) -> None:
    box = Box(tmp_path, SHARES="GPU-00000002-aaaa:4")
    for path in sorted((box.driver / "gpus" / bus(0)).iterdir()):
        path.unlink()
    (box.driver / "gpus" / bus(0)).rmdir()
    node = box.node()
    assert count_places_by_card(node.devices(), node.settings.shares) == {bus(2): 4}
    assert [device.index for device in node.devices() if device.id == bus(2)] == [1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("6", "CARD:PLACES"),
        ("6:", "2 to 100 places"),
        ("6:1", "2 to 100 places"),
        ("6:101", "2 to 100 places"),
        ("6:-4", "2 to 100 places"),
        ("6:٤", "2 to 100 places"),
        ("6:" + "9" * 5000, "2 to 100 places"),
        (":4", "CARD:PLACES"),
        ("a100:4", "CARD:PLACES"),
        ("03:00.0:4", "CARD:PLACES"),
        ("6:4 6:2", "once"),
    ],
)
def test_a_word_that_is_none_is_told(words: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Settings({"SHARES": words})
