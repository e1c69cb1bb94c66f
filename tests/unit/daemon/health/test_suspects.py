# SPDX-License-Identifier: Apache-2.0
"""A card that NVML has lost and the driver lists is no job's first choice, by default too."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import reconcile_locks
from tests.support.claims import ask, ids
from tests.support.health_site import Ward
from tests.support.trees import bus, judge_of, soon

LOST = "GPU is lost"


def write_suspects(ward: Ward, *lines: str) -> dict[str, str]:
    """Let gpulockd go round after the exporter has told this; return what a claim reads."""
    ward.sample(*lines)
    node = ward.node()
    report = reconcile_locks(node, judge_of(node), soon())
    ward.health.run(node, report, ward.now)
    return ward.suspects()


@pytest.mark.parametrize("plain", ["card", "any"])
@pytest.mark.parametrize(("shares", "count"), [("", 3), ("3:2", 2), ("3:2", 3)])
def test_without_any_policy_a_job_gets_no_lost_card_while_a_good_one_is_free(
    tmp_path: Path, plain: str, shares: str, count: int
) -> None:
    ward = Ward(tmp_path, 4, PLAIN_REQUEST=plain, SHARES=shares, QUARANTINE_ON="")
    write_suspects(ward, f"lost {bus(0)} 12.5 {LOST}", f"lost {bus(1)} 12.5 {LOST}")
    granted = ids(ask(ward, count))
    assert {bus(2), bus(3)} <= {*granted}
    assert (len(granted), ward.out()) == (count, [])
    assert write_suspects(ward) == {}


def test_what_is_no_card_of_this_node_or_no_reason_is_not_written(tmp_path: Path) -> None:
    ward = Ward(tmp_path, 4)
    assert write_suspects(ward, f"lost ../x 1 {LOST}", f"lost {bus(1)}", f"lost {bus(1)} x y") == {}


def test_what_was_told_stands_while_the_exporter_tells_nothing(tmp_path: Path) -> None:
    ward = Ward(tmp_path, 4)
    lost = write_suspects(ward, f"lost {bus(3)} 12.5 {LOST}")
    ward.now += 3600
    node = ward.node()
    report = reconcile_locks(node, judge_of(node), soon())
    ward.health.run(node, report, ward.now)
    assert ward.suspects() == lost == {bus(3): LOST}
