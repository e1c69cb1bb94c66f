# SPDX-License-Identifier: Apache-2.0
"""On the exporter's word alone half of a node goes out of service, and not more."""

from __future__ import annotations

import pytest

from gpulock.daemon.reconcile.exporter_limit import may_quarantine_card, note_set_by_exporter
from tests.support.trees import bus


@pytest.mark.parametrize(
    ("out", "cards", "may"),
    [
        ((), 1, True),
        ((), 0, True),
        ((1,), 1, False),
        ((1,), 3, False),
        ((1,), 4, True),
        ((1, 2), 4, False),
        ((0, 1, 2), 4, True),
    ],
)
def test_half_of_a_node_goes_out_on_an_exporters_word(
    out: tuple[int, ...], cards: int, may: bool
) -> None:
    assert may_quarantine_card(bus(0), {bus(number) for number in out}, cards) is may


@pytest.mark.parametrize(
    ("by", "reason", "counts"),
    [
        ("gpulock", "memory: 300 MiB", True),
        ("gpulock", "missing: not there; xid: XID 79", True),
        ("gpulock", "missing: not there", False),
        ("root", "memory: a module is to be replaced", False),
    ],
)
def test_a_note_counts_where_the_policy_made_it_for_what_an_exporter_said(
    by: str, reason: str, counts: bool
) -> None:
    assert note_set_by_exporter({"by": by, "reason": reason}) == counts
