# SPDX-License-Identifier: Apache-2.0
"""A workstation's claim takes the cards last that somebody uses without a claim."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.device_users import OpenFiles
from gpulock.workstation.process_claims import LOOK_SECONDS, prefer_unused_cards
from tests.support.claims import ids, never
from tests.support.faults import fail_at
from tests.support.trees import Box, box_with_shepherd, bus, record, soon

PID = 600


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node of four cards."""
    return box_with_shepherd(tmp_path)


def claim(box: Box, count: int) -> list[str]:
    """Claim for process PID as `gpulock run` does."""
    node, want = box.node(), ClaimRequest(count)
    one = record(token="", devices=(), scheduler="process", job_id=str(PID), pid=PID, add_grp_id=0)
    prefer_unused_cards(node, want, PID)
    return ids(claim_devices(node, one, want, never, soon()))


@pytest.mark.parametrize(("count", "granted"), [(1, [2]), (2, [2, 3]), (3, [0, 2, 3])])
def test_a_claim_gets_the_cards_that_nobody_has_open_as_far_as_they_go(
    box: Box, count: int, granted: list[int]
) -> None:
    box.proc.add(700, fds={9: box.dev / "nvidia0", 10: box.dev / "nvidia1"})
    assert claim(box, count) == [bus(number) for number in granted]


def test_where_every_card_is_in_use_a_claim_gets_one_all_the_same(box: Box) -> None:
    box.proc.add(700, fds={number: box.dev / f"nvidia{number}" for number in range(4)})
    assert claim(box, 1) == [bus(0)]


def test_processes_that_cannot_be_listed_refuse_no_claim(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, "scandir", "/proc", OSError(errno.EMFILE, "too many open files"))
    assert claim(box, 1) == [bus(0)]


def test_a_card_that_the_claiming_process_itself_has_open_is_not_avoided(box: Box) -> None:
    box.proc.add(PID, fds={9: box.dev / "nvidia0"})
    assert claim(box, 1) == [bus(0)]


@pytest.mark.attack
def test_the_look_for_unused_cards_has_a_small_limit(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: 30,000 open files, at which each claim of everybody looked for three seconds.

    Stopped by: a claim goes without what is not seen by then.
    """

    def look(files: OpenFiles, _: int | None) -> tuple[dict[str, list[int]], str]:
        assert files.seconds == LOOK_SECONDS < 1.0
        return {bus(0): [700]}, "process 700 has more files open than can be looked at in time"

    monkeypatch.setattr(OpenFiles, "users_by_device", look)
    assert claim(box, 1) == [bus(1)]
