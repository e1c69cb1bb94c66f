# SPDX-License-Identifier: Apache-2.0
"""What goes out of service where QUARANTINE_ON is not set, and what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.alloc.release import release_locks
from gpulock.errors import BUSY, Refusal
from tests.support.claims import ask, ids
from tests.support.health_site import GIB, ROUND, Ward
from tests.support.trees import bus, judge_of, soon

LOST = "lost: the driver does not answer for it: GPU is lost"


def default_ward(root: Path, gpus: int = 4) -> Ward:
    """Return a node whose settings do not name a policy, after its first round."""
    ward = Ward(root, gpus)
    del ward.settings["QUARANTINE_ON"]
    for number in range(gpus):
        ward.tell(number)
    ward.round()
    return ward


def next_job(ward: Ward, job_id: str, count: int) -> list[str]:
    """Let a job have so many GPUs and end at once; return them."""
    node, grant = ward.node(), ask(ward, count, job_id=job_id)
    token = grant.owner.token
    release_locks(node, lambda owner: owner.token == token, judge_of(node), soon(), "failed")
    return ids(grant)


def test_a_card_that_does_not_answer_is_taken_last_and_goes_out_after_a_minute(
    tmp_path: Path,
) -> None:
    ward = default_ward(tmp_path)
    ward.lose(0)
    ward.round()
    assert ward.out() == []
    assert bus(0) not in next_job(ward, "1", 3)
    ward.round(2)
    assert ward.reason(0) == LOST
    with pytest.raises(Refusal) as refused:
        next_job(ward, "2", 4)
    assert refused.value.kind == BUSY


@pytest.mark.parametrize("plain", ["card", "any"])
@pytest.mark.parametrize(("shares", "count"), [("", 3), ("3:2", 2), ("3:2", 3)])
def test_without_any_policy_a_job_gets_no_lost_card_while_a_good_one_is_free(
    tmp_path: Path, plain: str, shares: str, count: int
) -> None:
    ward = Ward(tmp_path, 4, PLAIN_REQUEST=plain, SHARES=shares, QUARANTINE_ON="")
    ward.lose(0)
    ward.lose(1)
    ward.round()
    granted = ids(ask(ward, count))
    assert {bus(2), bus(3)} <= {*granted}
    assert (len(granted), ward.out()) == (count, [])
    ward.now += 3600
    ward.round(sampled=False)
    assert ward.suspects() == dict.fromkeys([bus(0), bus(1)], "GPU is lost"), "nothing else is told"
    ward.lost.clear()
    ward.round()
    assert ward.suspects() == {}


def test_what_is_no_card_of_this_node_or_no_reason_is_no_loss(tmp_path: Path) -> None:
    ward = default_ward(tmp_path)
    ward.lose(2)
    ward.sample("lost ../x 1 GPU is lost", f"lost {bus(1)}", f"lost {bus(1)} x y")
    ward.now -= ROUND
    ward.round(sampled=False)
    assert ward.suspects() == {bus(2): "GPU is lost"}


def test_two_looks_before_and_after_a_long_pause_are_no_lasting_loss(tmp_path: Path) -> None:
    ward = default_ward(tmp_path)
    ward.lose(1)
    ward.tell(2, f"memory_used={GIB}")
    ward.round()
    for _ in range(4):
        ward.now += 8 * 3600  # the machine was suspended
        ward.round()
    assert (ward.out(), ward.cards().of(bus(2)).failed()) == ([], {})
    ward.now += 5  # a round that took its time
    ward.round()
    assert "memory" in ward.cards().of(bus(2)).failed()
    ward.round()
    assert ward.out() == [bus(1)]


def test_a_split_card_is_neither_missing_nor_lost(tmp_path: Path) -> None:
    ward = default_ward(tmp_path)
    ward.inventory(f"gpu.{bus(0)}.mig=1", f"mig.{bus(0)}.gi1.ci0.uuid=MIG-1", f"gpu.{bus(1)}.mig=1")
    ward.round(9)
    assert ward.out() == []


def test_a_card_that_fell_off_the_bus_still_counts_for_half_of_the_node(tmp_path: Path) -> None:
    ward = default_ward(tmp_path)
    (ward.driver / "gpus" / bus(3)).rename(ward.root / "fell-off")
    for number in (0, 1):
        ward.log_xid(number)
    ward.round()
    assert ward.out() == [bus(0), bus(1)]
