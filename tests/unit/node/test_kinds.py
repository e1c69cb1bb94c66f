# SPDX-License-Identifier: Apache-2.0
"""Kinds of devices, by the driver's names; SHARES, by index, UUID or bus id."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulock.node.devices import Device
from gpulock.node.kinds import (
    device_kind,
    format_device_kinds,
    is_of_kind,
    matches_pattern,
    model_slug,
    parse_kind,
)
from gpulock.node.settings import Settings
from gpulock.node.shares import count_places_by_card
from tests.support.trees import Box, bus


def card(model: str, number: int = 1) -> Device:
    device = Device(f"0000:{number:02x}:00.0", number)
    device.model = model
    return device


def instance(profile: str, model: str = "NVIDIA A100-SXM4-80GB") -> Device:
    device = Device("0000:01:00.0.gi1.ci0", 0)
    device.model, device.profile = model, profile
    return device


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA", "nvidia"),
        ("", ""),
    ],
)
def test_a_model_is_written_as_requests_write_it(model: str, slug: str) -> None:
    assert model_slug(model) == slug
    assert device_kind(card(model)) == slug


@pytest.mark.parametrize(
    "kind",
    [
        *("model:A100*", "model:*80gb", "model:a100*80gb", "model:a100-sxm4-80gb", "model:*"),
        *("model:nvidia_a100-sxm4-80gb", "card", "mixed", "any"),
    ],
)
def test_a_card_is_of_its_model(kind: str) -> None:
    assert is_of_kind(card("NVIDIA A100-SXM4-80GB"), parse_kind(kind))


@pytest.mark.parametrize(
    "kind", ["model:a100", "model:h100", "model:100*", "mig:3g.40gb", "mig:*", "share"]
)
def test_a_card_is_of_no_other_kind(kind: str) -> None:
    assert not is_of_kind(card("NVIDIA A100-SXM4-80GB"), parse_kind(kind))


@example("ab*ba", "aba")  # what stands before the star and behind it may not overlap
@given(st.from_regex(r"[ab-]{0,3}\*?[ab-]{0,3}", fullmatch=True), st.text("ab-", min_size=1))
def test_a_star_stands_for_anything(pattern: str, name: str) -> None:
    assert matches_pattern(name, pattern) == fnmatch.fnmatchcase(name, pattern)


def test_what_there_is_is_counted_by_kind() -> None:
    found = [card("NVIDIA H200", 1), card("NVIDIA H200", 2), instance("3g.40gb")]
    assert format_device_kinds(found) == "h200 (2), 3g.40gb (1)"
    assert format_device_kinds([]) == "no GPU"


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


# --- SHARES: which cards have places --------------------------------------------------------------


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
