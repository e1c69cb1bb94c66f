# SPDX-License-Identifier: Apache-2.0
"""What finds faults in parsers: a planted one is found, told as it was, and made small."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import settings  # noqa: TID251 (a count alone)

from tests.support import mutations
from tests.support.mutations import mixed, shrink, try_a_million, try_batch

SAMPLES = (b"number=12345\nname=alice\n", b"number=7\nname=bob smith\n")


def planted(data: bytes) -> None:
    """Fail by a long number alone; refuse much else."""
    digits = data.partition(b"number=")[2].partition(b"\n")[0]
    if digits.isdigit() and len(digits) > 18:
        raise OverflowError(digits)


def test_a_planted_fault_is_told_as_it_was_and_made_small() -> None:
    with pytest.raises(AssertionError) as told:
        try_batch(SAMPLES, planted, seed=1, size=10_000)
    number, seed = str(told.value).split()[1], 1
    rng = random.Random(seed)
    inputs = [mixed(SAMPLES, rng) for _ in range(int(number) + 1)]
    assert repr(inputs[-1]) in str(told.value)
    least = str(told.value).rpartition("the least: ")[2]
    assert re.fullmatch(r"b'number=\d{19}'", least)


def test_what_fails_otherwise_is_no_smaller_input() -> None:
    def check(data: bytes) -> None:
        if b"x" not in data:
            raise KeyError(data)
        if b"y" in data:
            raise IndexError(data)

    assert shrink(b"aaxaayaa", check, IndexError) == b"xy"


def test_a_sample_that_its_parser_refuses_is_told_at_once() -> None:
    with pytest.raises(OverflowError):
        try_a_million((b"number=" + b"1" * 19,), planted)


def test_each_batch_has_its_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bytes] = set()
    few = settings(mutations.SEEDS, max_examples=20)
    monkeypatch.setattr(mutations, "SEEDS", few)
    monkeypatch.setattr(mutations, "BATCH", 50)
    try_a_million(SAMPLES, seen.add)
    assert len(seen) > 500


def test_words_tokens_and_cuts_are_all_tried() -> None:
    rng = random.Random(0)
    found = [mixed(SAMPLES, rng) for _ in range(2000)]
    for part in (b"\0", b"\xff", b"9" * 20, b"number=alice", b"number=\n"):
        assert any(part in one for one in found), part
    assert any(len(one) < 10 for one in found)
    assert any(one.count(b"name") > 1 for one in found)
