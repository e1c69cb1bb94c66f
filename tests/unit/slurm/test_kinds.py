# SPDX-License-Identifier: Apache-2.0
"""Typed GRES where gpulock chooses: the positions say of which kinds a job gets devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulock.slurm.prolog import GO_ON, NODE_BROKEN
from tests.support.slurm_site import Site
from tests.support.trees import bus

OURS = {"SLURM_DEVICE_SELECTION": "gpulock"}


@pytest.fixture
def two_models(site: Site) -> Site:
    """The last two cards are H200."""
    for number, model in enumerate(("NVIDIA A100-SXM4-80GB",) * 2 + ("NVIDIA H200",) * 2):
        site.gpu(bus(number), number, Model=model)
    site.set(**OURS)
    return site


def test_of_positions_that_slurm_counted_the_same_kinds_are_given(two_models: Site) -> None:
    assert two_models.prolog(12, "2") == GO_ON
    assert [device.id for device in two_models.note(12).devices] == [bus(2)]
    assert two_models.prolog(13, "0,2") == GO_ON  # as many of each kind, whichever are free
    assert [device.id for device in two_models.note(13).devices] == [bus(0), bus(3)]


def lose_the_map(site: Site) -> None:
    (site.state / "slurm-map").unlink()


def lose_a_card(site: Site) -> None:
    site.map("0", "1", "7", "3")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (lose_the_map, "slurm-map: [Errno 2]"),
        (lose_a_card, "the driver shows no GPU for Slurm's 2 (/dev/nvidia7)"),
    ],
)
def test_a_position_that_no_map_tells_gets_no_card_of_another_model(
    two_models: Site, what: Callable[[Site], None], told: str
) -> None:
    what(two_models)
    assert two_models.prolog(12, "2") == NODE_BROKEN
    assert two_models.locks() == []
    assert told in two_models.drained()[0]


def test_an_instance_that_no_exporter_tells_is_no_card(site: Site) -> None:
    site.set(**OURS)
    site.map("0", "1", "2", "3.gi1.ci0")
    (site.driver / "capabilities/gpu3/mig/gi1/ci0").mkdir(parents=True)
    assert site.prolog(12, "3") == GO_ON
    assert "nothing tells which device Slurm's 3 is" in site.refused(12, "unknown")


@pytest.mark.parametrize("other", ["3g.40gb", "1g.10gb+me"])
def test_a_position_that_is_an_instance_gets_one_of_its_profile(site: Site, other: str) -> None:
    site.set(**OURS)
    site.map("0.gi1.ci0", "0.gi2.ci0", "1", "2", "3")
    one, two = site.mig()
    site.inventory(
        f"gpu.{bus(0)}.mig=1",
        *(f"mig.{bus(0)}.gi1.ci0.uuid=MIG-1", f"mig.{bus(0)}.gi1.ci0.profile=3g.40gb"),
        *(f"mig.{bus(0)}.gi2.ci0.uuid=MIG-2", f"mig.{bus(0)}.gi2.ci0.profile={other}"),
    )
    assert site.prolog(12, "1") == GO_ON
    assert site.granted() == [one if other == "3g.40gb" else two]
    assert site.prolog(13, "2") == GO_ON
    assert site.granted(13) == [bus(1)]
