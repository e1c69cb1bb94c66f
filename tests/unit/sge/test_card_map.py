# SPDX-License-Identifier: Apache-2.0
"""Ids of an RSMAP: exactly the GPUs that Grid Engine granted, by the administrator's map."""

from __future__ import annotations

import pytest

from gpulock.sge import prolog
from gpulock.sge.card_map import NAME, format_card_map
from gpulock.sge.hook import JOB_ERROR
from tests.support.jobs import Site, variables
from tests.support.packed_job import Ask, Grant, ocs_job
from tests.support.trees import bus

# As in the examples of Open Cluster Scheduler: the first one is GPU1.
CARDS = {("card", f"GPU{n + 1}"): bus(n) for n in range(4)} | {("old", "GPU0"): bus(0)}
HOST = "node"


@pytest.fixture
def mapped(site: Site) -> Site:
    site.state.mkdir(exist_ok=True)
    (site.state / NAME).write_text(format_card_map(HOST, CARDS))
    return site


def start(site: Site, *ids: str, job_id: int = 12, amount: float = 0, times: int = 1) -> int:
    """Run the prolog of a job that was granted these ids."""
    job = site.run(owner="alice", job_id=job_id)
    asks = (Ask("card", amount or len(ids)),)
    grants = (Grant("card", amount or len(ids), "node", tuple((one, times) for one in ids)),)
    job.job_file.write_bytes(ocs_job(asks, grants, job_id=job_id))
    config = site.config(SGE_COMPLEXES="gpu card")
    return prolog.main(["prolog", str(site.pid)], site.environ(job), config)


def test_a_job_gets_the_cards_that_were_granted_and_no_other(mapped: Site) -> None:
    """GPU1 and GPU3 are free as well, and would be chosen where Grid Engine does not choose."""
    assert start(mapped, "GPU4", "GPU2") == 0
    assert mapped.locks() == [bus(1), bus(3)]
    assert variables(mapped.root / "sge/spool/node/active_jobs/12.1")["CUDA_VISIBLE_DEVICES"] == (
        "1,3"
    )


@pytest.mark.parametrize(
    ("ids", "amount", "times"),
    [
        (("GPU9",), 0, 1),  # not in the map
        (("GPU0",), 0, 1),  # another complex's
        (("GPU1",), 1, 2),  # one card for two
        (("GPU1", "GPU1"), 2, 1),
        (("GPU1",), 2, 1),  # fewer ids than GPUs
    ],
)
def test_ids_that_are_not_just_the_cards_are_refused(
    mapped: Site, ids: tuple[str, ...], amount: float, times: int
) -> None:
    assert start(mapped, *ids, amount=amount, times=times) == JOB_ERROR
    assert mapped.locks() == []


@pytest.mark.parametrize("text", [None, "", "gpulock-sge-map 2\n", "\0"])
def test_without_a_map_the_job_is_refused_and_the_queue_stays(site: Site, text: str | None) -> None:
    if text is not None:
        site.state.mkdir(exist_ok=True)
        (site.state / NAME).write_text(text)
    assert start(site, "GPU1") == JOB_ERROR
    assert site.locks() == []
