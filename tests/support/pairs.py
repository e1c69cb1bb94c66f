# SPDX-License-Identifier: Apache-2.0
"""`zip(strict=True)` and `itertools.pairwise`, which Python 3.9 lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, overload

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


@overload
def zip_equal(first: Iterable[A], second: Iterable[B], /) -> list[tuple[A, B]]: ...
@overload
def zip_equal(
    first: Iterable[A], second: Iterable[B], third: Iterable[C], /
) -> list[tuple[A, B, C]]: ...
def zip_equal(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the rows of columns that must be equally long."""
    listed = [list(column) for column in columns]
    lengths = [len(column) for column in listed]
    assert len(set(lengths)) == 1, f"columns of {lengths} rows"
    return list(zip(*listed))


def pairwise(values: Iterable[A]) -> list[tuple[A, A]]:
    """Return each value with the one after it."""
    listed = list(values)
    return list(zip(listed, listed[1:]))
