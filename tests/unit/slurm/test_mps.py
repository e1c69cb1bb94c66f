# SPDX-License-Identifier: Apache-2.0
"""SHARE_MPS: the Prolog lets a job with a place start once the MPS of its card runs."""

from __future__ import annotations

import time

import pytest

from gpulock.slurm.prolog import GO_ON
from tests.support.locks import say_mps
from tests.support.slurm_site import Site
from tests.support.trees import bus

SERVER = 4242


@pytest.fixture
def shared(site: Site) -> Site:
    """The last card has four places, and MPS."""
    ours = {"SLURM_DEVICE_SELECTION": "gpulock", "SLURM_GRES": "gpu gpux"}
    site.set(**ours, SHARES="3:4", SHARE_MPS="yes")
    site.proc.add(SERVER)
    return site


def test_a_job_with_places_starts_when_mps_runs(
    shared: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[list[str]] = []

    def start_mps(_: float) -> None:
        waited.append(shared.notes())
        mark = f"{SERVER} {shared.node().proc.start(SERVER)}\n"
        say_mps(shared.node().store, mark)

    monkeypatch.setattr(time, "sleep", start_mps)
    assert shared.requested(12, "gpu:share:2") == GO_ON
    assert waited == [[]], "its tasks were told before"
    assert shared.granted() == [f"{bus(3)}.share1", f"{bus(3)}.share2"]
