# SPDX-License-Identifier: Apache-2.0
"""Choosing devices: the best set of all."""

from __future__ import annotations

import itertools
import random
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.alloc import choose
from gpulock.alloc.choose import choose_best_set, score_pairs
from gpulock.node import device_list
from gpulock.node.devices import Device
from gpulock.simulate.node import write_simulated_node

Links = dict[tuple[str, str], int]


def sum_pair_scores(scores: list[list[int]], members: list[int]) -> int:
    """Return the sum of the scores of all pairs in `members`."""
    return sum([scores[a][b] for n, a in enumerate(members) for b in members[:n]])


@cache
def machine(preset: str) -> tuple[list[Device], Links]:
    with tempfile.TemporaryDirectory() as folder:
        node = write_simulated_node(Path(folder) / "n", preset)
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        told = device_list.read_nvml_inventory(str(node.lock_dir), boot_id)
        found = device_list.read_devices(str(node.driver_root), str(node.sys_root))
    return device_list.apply_nvml_inventory(found, told), device_list.nvlink_counts(told)


def best(scores: list[list[int]], count: int) -> list[int]:
    """Return the best set by the definition: inner links, then those left, then lowest first."""
    everything = range(len(scores))

    def value(members: tuple[int, ...]) -> tuple[int, int]:
        rest = [i for i in everything if i not in members]
        return sum_pair_scores(scores, list(members)), sum_pair_scores(scores, rest)

    sets = list(itertools.combinations(everything, count))
    top = max(value(members) for members in sets)
    return list(next(members for members in sets if value(members) == top))


@pytest.mark.parametrize("preset", ["dgx1", "dgx-h200", "workstation"])
def test_exact_is_the_best_of_all_sets_on_real_machines(preset: str) -> None:
    found, links = machine(preset)
    for count in range(1, len(found) + 1):
        scores = score_pairs(found, links)
        assert [d.index for d in choose.choose_devices(found, count, links)] == best(scores, count)


def test_a_pair_on_a_dgx1_is_joined_twice() -> None:
    found, links = machine("dgx1")
    a, b = choose.choose_devices(found, 2, links)
    assert links[a.bus, b.bus] == 2


def test_too_many_or_none_is_nothing() -> None:
    found, links = machine("dgx1")
    for count in (0, -1, len(found) + 1):
        assert choose.choose_devices(found, count, links) == []
    assert choose.choose_devices([], 1) == []


def test_all_sets_of_half_of_sixteen_are_tried() -> None:
    """The last one of them is the best here."""
    scores = [[int(a > 7 and b > 7 and a != b) for b in range(16)] for a in range(16)]
    assert choose_best_set(scores, 8) == list(range(8, 16))


def shuffled_links(size: int, seed: int) -> tuple[list[Device], Links]:
    dice = random.Random(seed)
    free = [Device(f"0000:{n + 1:02x}:00.0", n) for n in range(size)]
    links: Links = {}
    for a, b in itertools.combinations(free, 2):
        links[a.bus, b.bus] = links[b.bus, a.bus] = dice.choice([0, 0, 1, 2])
    return free, links


@pytest.mark.slow
@given(st.integers(1, 14), st.integers(1, 14), st.integers(0, 1000))
def test_a_choice_is_a_subset_of_just_that_size_in_order_and_always_the_same(
    size: int, count: int, seed: int
) -> None:
    free, links = shuffled_links(size, seed)
    chosen = choose.choose_devices(free, count, links)
    assert len(chosen) == (count if count <= size else 0)
    assert [d.index for d in chosen] == sorted({d.index for d in chosen})
    assert choose.choose_devices(list(free), count, dict(links)) == chosen


@pytest.mark.parametrize(("numa", "chosen"), [(0, [0, 2]), (1, [0, 2]), (-1, [0, 1])])
def test_cards_of_one_numa_node_that_is_known_are_nearer(numa: int, chosen: list[int]) -> None:
    cards = [Device(f"0000:{number}b:00.0", number) for number in range(3)]
    cards[0].numa = cards[2].numa = numa
    cards[1].numa = 5
    assert [card.index for card in choose.choose_devices(cards, 2)] == chosen


def test_cards_behind_one_pci_switch_are_nearer_than_those_of_one_numa_node() -> None:
    cards = [Device(f"0000:{number}b:00.0", number) for number in range(3)]
    for card, switch in zip(cards, "aba"):
        card.numa, card.path = 0, ("pci0000:00", "0000:00:01.0", switch)
    assert [card.index for card in choose.choose_devices(cards, 2)] == [0, 2]


def test_several_devices_are_whole_cards_where_there_are_enough_of_them() -> None:
    """CUDA shows a process one MIG instance, however many it was granted."""
    slices = [Device(f"0000:1b:00.0.gi{number}.ci0", 0) for number in range(2)]
    cards = [Device(f"0000:4{number}:00.0", number + 1) for number in range(2)]
    assert choose.choose_devices([*slices, *cards], 2) == cards
    assert len(choose.choose_devices([*slices, *cards], 3)) == 3
    assert len(choose.choose_devices([*slices, *cards], 4)) == 4
