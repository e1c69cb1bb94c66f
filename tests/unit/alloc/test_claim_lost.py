# SPDX-License-Identifier: Apache-2.0
"""What somebody removes of locks and records is back before a grant, or nothing is granted."""

from __future__ import annotations

import os

import pytest

from gpulock.alloc.release import release_locks
from gpulock.errors import UNKNOWN, Refusal
from gpulock.store import grants
from tests.support.claims import ask, refused
from tests.support.trees import Box, judge_of, soon


def lose_gate_after(box: Box, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the gate be removed once claims were changed under it."""
    real = getattr(grants, name)

    def change(*args: object) -> None:
        real(*args)
        (box.records / "gate").unlink()

    monkeypatch.setattr(grants, name, change)


def test_a_claim_whose_gate_was_replaced_is_refused_and_undone(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_gate_after(box, monkeypatch, "make_claim")
    assert refused(box).kind == UNKNOWN
    assert box.locks() == []
    assert os.listdir(box.records / "claims") == []


def test_a_claim_that_fails_where_its_gate_was_replaced_says_that(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> None:
        (box.records / "gate").unlink()
        raise OSError(2, "no such folder")

    monkeypatch.setattr(grants, "make_claim", lose)
    assert "was replaced meanwhile" in refused(box).why


def test_a_release_whose_gate_was_replaced_says_so(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = ask(box, 1)
    lose_gate_after(box, monkeypatch, "release_devices")
    box.proc.remove(500)
    node = box.node()
    with pytest.raises(Refusal, match="replaced"):
        release_locks(node, lambda o: o.token == grant.owner.token, judge_of(node), soon(), "test")
