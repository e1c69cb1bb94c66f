# SPDX-License-Identifier: Apache-2.0
"""Typed GRES where gpulock chooses: the type is the kind of the devices that a job gets."""

from __future__ import annotations

import pytest

from gpulock.slurm.prolog import GO_ON
from tests.support.slurm_site import Site, row
from tests.support.trees import bus

OURS = {"SLURM_DEVICE_SELECTION": "gpulock", "SLURM_COUNT": "comment"}
ASKED = {**OURS, "SLURM_COUNT": "slurmctld"}


@pytest.fixture
def two_models(site: Site) -> Site:
    """The last two cards are H200."""
    for number, model in enumerate(("NVIDIA A100-SXM4-80GB",) * 2 + ("NVIDIA H200",) * 2):
        site.gpu(bus(number), number, Model=model)
    site.set(**OURS)
    return site


def granted(site: Site, comment: str, job: int = 12) -> list[str]:
    assert site.prolog(job, None, SLURM_JOB_COMMENT=comment) == GO_ON
    return [device.id for device in site.note(job).devices]


def refused(site: Site, comment: str, job: int = 12) -> str:
    assert site.prolog(job, None, SLURM_JOB_COMMENT=comment) == GO_ON
    assert site.note(job).devices == []
    return site.note(job).refused


def test_the_type_of_a_comment_is_the_model_that_is_given(two_models: Site) -> None:
    assert granted(two_models, "gres:gpu:h200:2") == [bus(2), bus(3)]
    assert granted(two_models, "gres:gpu:nvidia_a100:1", 13) == [bus(0)]


def test_several_types_are_given_to_one_job(two_models: Site) -> None:
    assert granted(two_models, "gpu:h200:1,gpu:a100:2") == [bus(0), bus(1), bus(2)]


def test_slurmctlds_word_is_followed_as_well(two_models: Site) -> None:
    two_models.set(**ASKED)
    two_models.answers(row(12, Gres="gres:gpu:h200:1"))
    assert two_models.prolog(12, None) == GO_ON
    assert [device.id for device in two_models.note(12).devices] == [bus(2)]


def test_a_type_that_is_not_here_is_told_with_what_is(two_models: Site) -> None:
    text = refused(two_models, "gpu:h100:1")
    assert "model h100: this node has a100-sxm4-80gb (2), h200 (2)" in text


def test_an_instance_is_given_by_its_profile(two_models: Site) -> None:
    told = f"mig.{bus(0)}.gi1.ci0"
    two_models.inventory(f"gpu.{bus(0)}.mig=1", f"{told}.uuid=MIG-a", f"{told}.profile=3g.40gb")
    assert granted(two_models, "gpu:3g.40gb:1") == [f"{bus(0)}.gi1.ci0"]


def test_a_share_is_a_place_on_a_card(two_models: Site) -> None:
    two_models.set(**OURS, SHARES="3:4")
    assert granted(two_models, "gpu:share:1") == [f"{bus(3)}.share1"]
    assert "comes alone" not in refused(two_models, "gpu:h100:1", 13)
    text = refused(two_models, "gpu:share:1,gpu:h200:1", 14)
    assert "a share and other GPUs are asked for in one job" in text


def test_of_positions_that_slurm_counted_the_same_kinds_are_given(two_models: Site) -> None:
    two_models.set(SLURM_DEVICE_SELECTION="gpulock", SLURM_COUNT="gpus")
    assert two_models.prolog(12, "2") == GO_ON
    assert [device.id for device in two_models.note(12).devices] == [bus(2)]
    assert two_models.prolog(13, "0,2") == GO_ON  # as many of each kind, whichever are free
    assert [device.id for device in two_models.note(13).devices] == [bus(0), bus(3)]
