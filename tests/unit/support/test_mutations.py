# SPDX-License-Identifier: Apache-2.0
"""What finds faults in parsers tells a planted one, with the input that finds it again."""

from __future__ import annotations

import random

import pytest

from tests.support.mutations import mixed, try_a_million, try_batch

SAMPLES = (b"number=12345\nname=alice\n", b"number=7\nname=bob smith\n")


def planted(data: bytes) -> None:
    """Fail by a long number alone."""
    digits = data.partition(b"number=")[2].partition(b"\n")[0]
    if digits.isdigit() and len(digits) > 18:
        raise OverflowError(digits)


def test_a_planted_fault_is_told_as_it_was() -> None:
    with pytest.raises(AssertionError) as told:
        try_batch(SAMPLES, planted, seed=1, size=10_000)
    rng = random.Random(1)
    inputs = [mixed(SAMPLES, rng) for _ in range(int(str(told.value).split()[1]) + 1)]
    assert repr(inputs[-1]) in str(told.value)


def test_a_sample_that_its_parser_refuses_is_told_at_once() -> None:
    with pytest.raises(OverflowError):
        try_a_million((b"number=" + b"1" * 19,), planted)
