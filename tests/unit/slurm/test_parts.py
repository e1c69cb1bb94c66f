# SPDX-License-Identifier: Apache-2.0
"""A job that asks for a part of a GPU (gres/shard, gres/mps) gets none, and is told so at once."""

from __future__ import annotations

import pytest

from gpulock.errors import INVALID_REQUEST
from tests.support.slurm_site import RUN, Site, row

MPS = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
REASON = "the job asks for a part of a GPU (gres/shard), which this node does not give"


def sharing(site: Site, *rows: str, shared: str = "shard") -> Site:
    """Let slurmd give out parts of this node's GPUs, and squeue know jobs."""
    site.map("0", "1", "2", "3", shared=shared)
    site.answers(*rows)
    return site


@pytest.mark.parametrize("mode", ["slurm", "gpulock"])
@pytest.mark.parametrize(
    "asked",
    [
        *({"Gres": f"gres{text}"} for text in (":shard:1", "/shard:1", ":shard", ":shard:a100:2")),
        *({f"tres-per-{what}": "gres:shard:1"} for what in ("job", "socket", "task")),
    ],
)
def test_a_shard_job_fails_with_the_reason_and_the_node_stays(
    site: Site, mode: str, asked: dict[str, str]
) -> None:
    site.set(SLURM_DEVICE_SELECTION=mode)
    sharing(site, row(12, **asked))
    assert site.prolog(12, "0") == RUN
    assert REASON in site.refused(12, INVALID_REQUEST, code=1)
    assert "--gres=gpu:1" in site.note().refused
    assert (site.locks(), site.drained()) == ([], [])


@pytest.mark.parametrize("gpus", ["0", None])
def test_an_mps_job_fails_with_the_reason_and_nobody_is_asked(site: Site, gpus: str | None) -> None:
    assert site.prolog(12, gpus, **MPS) == RUN
    assert "(gres/mps)" in site.refused(12, INVALID_REQUEST, code=1)
    assert (site.locks(), site.calls()) == ([], [])


def test_a_job_without_gpus_asks_nobody(site: Site) -> None:
    sharing(site)
    assert site.prolog(12, None) == RUN
    assert site.calls() == []
