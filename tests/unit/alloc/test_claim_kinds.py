# SPDX-License-Identifier: Apache-2.0
"""A claim by kind: a model, a MIG instance, and what a plain request never gets."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.alloc.choose import LAST, LATE, ClaimRequest
from gpulock.alloc.claim import Grant, claim_devices
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.node.devices import lock_ids_overlap
from tests.support.claims import ask, ids, pick, refused
from tests.support.faults import refusal
from tests.support.trees import Box, bus, judging, record, soon

A100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"
PARTS = (
    *(f"mig.{bus(0)}.gi1.ci0.uuid=MIG-a", f"mig.{bus(0)}.gi1.ci0.profile=3g.40gb"),
    *(f"mig.{bus(0)}.gi9.ci0.uuid=MIG-b", f"mig.{bus(0)}.gi9.ci0.profile=1g.10gb"),
)
THERE = "a100-sxm4-80gb (2), h200 (3)"


@pytest.fixture
def two_models(tmp_path: Path) -> Box:
    """Two A100, three H200."""
    made = Box(tmp_path, 5)
    for number in range(5):
        made.gpu(bus(number), number, Model=A100 if number < 2 else H200)
    return made


@pytest.fixture
def split(tmp_path: Path) -> Box:
    """Three A100, of which the first has two MIG instances."""
    made = Box(tmp_path, 3)
    for number in range(3):
        made.gpu(bus(number), number, Model=A100)
    made.inventory(f"gpu.{bus(0)}.mig=1", *PARTS)
    return made


def ask_kinds(box: Box, *kinds: tuple[str, int], job_id: str = "12") -> Grant:
    node = box.node()
    want = ClaimRequest(sum(count for _, count in kinds), kinds=kinds)
    one = record(token="", devices=(), job_id=job_id)
    return claim_devices(node, one, want, judging(node), soon())


def refused_kinds(box: Box, *kinds: tuple[str, int]) -> Refusal:
    return refusal(lambda: ask_kinds(box, *kinds, job_id="99"))


def test_a_model_is_what_is_given(two_models: Box) -> None:
    assert ids(ask_kinds(two_models, ("model:h200", 1))) == [bus(2)]
    assert ids(ask_kinds(two_models, ("model:a100*", 2), job_id="13")) == [bus(0), bus(1)]
    busy = refused_kinds(two_models, ("model:a100*", 1))
    assert busy.kind == BUSY
    assert busy.why == "1 of model a100* asked for, 0 of 2 free (0: job 13; 1: job 13)"


def test_a_model_that_is_not_here_is_told_with_what_is(two_models: Box) -> None:
    refusal = refused_kinds(two_models, ("model:h100", 1))
    assert refusal.kind == INVALID_REQUEST
    assert refusal.why == f"model h100: this node has {THERE}"
    refusal = refused_kinds(two_models, ("model:a100*", 3))
    assert refusal.kind == INVALID_REQUEST
    assert refusal.why == f"3 of model a100* asked for: this node has {THERE}"
    assert two_models.locks() == []


def test_several_kinds_are_given_to_one_job(two_models: Box) -> None:
    grant = ask_kinds(two_models, ("", 2), ("model:h200", 2))
    assert ids(grant) == [bus(0), bus(1), bus(2), bus(3)]
    assert refused_kinds(two_models, ("model:h200", 2), ("model:h*", 2)).kind == INVALID_REQUEST
    assert refused_kinds(two_models, ("model:h200", 3), ("model:*", 3)).kind == INVALID_REQUEST
    short = refused_kinds(two_models, ("model:a100*", 1), ("model:h200", 1))
    assert ", 1 of 5 free (0: job 12; 1: job 12; 2: job 12; 3: job 12; 4: free)" in short.why


def test_a_plain_request_gets_cards_of_one_model(two_models: Box) -> None:
    assert ids(ask(two_models, 2)) == [bus(0), bus(1)]
    assert ids(ask(two_models, 3, job_id="13")) == [bus(2), bus(3), bus(4)]


def test_one_card_is_of_the_model_with_the_fewest_free(two_models: Box) -> None:
    ask_kinds(two_models, ("model:h200", 2), job_id="13")
    assert ids(ask(two_models, 1)) == [bus(4)], "two A100 are left to a job of two"


def test_a_plain_request_of_more_than_one_models_cards_is_invalid(two_models: Box) -> None:
    refusal = refused(two_models, 4)
    assert refusal.kind == INVALID_REQUEST
    assert refusal.why == f"4 GPUs asked for, all of one model: this node has {THERE}"
    two_models.settings["PLAIN_REQUEST"] = "mixed"
    assert len(ask(two_models, 4).devices) == 4
    assert refused(two_models, 6, job_id="13").kind == INVALID_REQUEST


def test_a_plain_request_waits_for_cards_of_one_model(two_models: Box) -> None:
    pick(two_models, bus(0))
    pick(two_models, bus(2), "13")
    pick(two_models, bus(3), "14")
    assert refused(two_models, 2, job_id="15").kind == BUSY
    assert ids(ask(two_models, 1, job_id="15")) == [bus(1)]


def test_a_broken_card_of_a_model_is_the_nodes_fault(two_models: Box) -> None:
    (two_models.driver / "gpus" / bus(4) / "information").write_text("garbage")
    assert refused_kinds(two_models, ("model:h200", 3)).kind == BROKEN
    assert refused_kinds(two_models, ("model:a100*", 3)).kind == BROKEN  # it may be one
    assert refused_kinds(two_models, ("model:h100", 1)).kind == INVALID_REQUEST
    two_models.settings["EXPECTED_GPUS"] = "6"
    assert refused(two_models, 4).kind == BROKEN
    assert refused(two_models, 5).kind == INVALID_REQUEST


def test_a_plain_request_gets_no_instance(split: Box) -> None:
    assert ids(ask(split, 1)) == [bus(1)]
    assert ids(ask(split, 1, job_id="13")) == [bus(2)]
    assert refused(split, 1, job_id="14").kind == BUSY
    too_many = refused(split, 3, job_id="14")
    assert too_many.kind == INVALID_REQUEST
    assert too_many.why.endswith("this node has 3g.40gb (1), 1g.10gb (1), a100-sxm4-80gb (2)")


def test_a_plain_request_may_get_an_instance_where_the_site_says_so(split: Box) -> None:
    split.settings["PLAIN_REQUEST"] = "any"
    assert len(ask(split, 4).devices) == 4


def test_an_instance_whose_profile_nobody_tells_is_unknown_not_impossible(tmp_path: Path) -> None:
    box = Box(tmp_path, 1)
    (box.driver / "capabilities/gpu0/mig/gi1/ci0").mkdir(parents=True)
    assert refused_kinds(box, ("mig:3g.40gb", 1)).kind == UNKNOWN
    told = f"mig.{bus(0)}.gi1.ci0"
    box.inventory(f"gpu.{bus(0)}.mig=1", f"{told}.uuid=MIG-a", f"{told}.profile=3g.40gb")
    assert refused_kinds(box, ("mig:7g.80gb", 1)).kind == INVALID_REQUEST
    assert ids(ask_kinds(box, ("mig:3g.40gb", 1))) == [told.removeprefix("mig.")]


def test_cards_that_are_taken_last_are_so_within_a_kind(two_models: Box) -> None:
    node = two_models.node()
    want = ClaimRequest(1, kinds=(("model:h200", 1),))
    want.last = {bus(2): LATE, bus(3): LAST}
    one = record(token="", devices=())
    assert ids(claim_devices(node, one, want, judging(node), soon())) == [bus(4)]
    assert ids(ask_kinds(two_models, ("model:h200", 2), job_id="13")) == [bus(2), bus(3)]


KINDS = st.sampled_from(["", "", "model:a100*", "model:*", "mig:3g.40gb", "mig:1g.*", "any"])
REQUESTS = st.lists(
    st.lists(st.tuples(KINDS, st.integers(1, 3)), min_size=1, max_size=2), max_size=8
)


@pytest.mark.slow
@given(REQUESTS)
def test_whatever_is_asked_for_no_card_is_whole_and_split_and_no_plain_job_gets_a_slice(
    asked: list[list[tuple[str, int]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        box = Box(Path(folder), 4)
        for number in range(4):
            box.gpu(bus(number), number, Model=A100 if number < 3 else H200)
        box.inventory(f"gpu.{bus(0)}.mig=1", *PARTS)
        held: list[str] = []
        for job, kinds in enumerate(asked):
            try:
                found = ask_kinds(box, *kinds, job_id=str(100 + job)).devices
            except Refusal:
                continue
            assert len(found) == sum(count for _, count in kinds)
            if not any(kind == "any" or kind.startswith("mig:") for kind, _ in kinds):
                assert not any(device.parent for device in found)
            if [kind for kind, _ in kinds] == [""]:
                assert len({device.model for device in found}) == 1
            for device in found:
                assert not any(lock_ids_overlap(device.id, name) for name in held)
                held.append(device.id)
        assert sorted(held) == box.locks()
