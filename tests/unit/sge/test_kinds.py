# SPDX-License-Identifier: Apache-2.0
"""Requests by kind on Grid Engine: which complex counts what, several of them in one job."""

from __future__ import annotations

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.errors import INVALID_REQUEST, Refusal
from gpulock.node.settings import Settings
from gpulock.sge import claim, request
from tests.support.jobs import Site, gpus
from tests.support.packed_job import PER_JOB, PER_SLOT

COMPLEXES = "gpu gpu_a100=model:a100* mig_3g=mig:3g.40gb gpu_share=share gpuj gpu_job=model:a100*"
SETTINGS = Settings({"SGE_COMPLEXES": COMPLEXES})


def kinds(site: Site) -> tuple[tuple[str, int], ...]:
    return request.read_sge_job_gpus(site.above(site.pid), SETTINGS)[0]


def why_refused(site: Site) -> str:
    with pytest.raises(Refusal) as caught:
        kinds(site)
    assert caught.value.kind == INVALID_REQUEST
    return caught.value.why


def wanted(site: Site) -> ClaimRequest:
    spool = site.above(site.pid)
    found, job = request.read_sge_job_gpus(spool, SETTINGS)
    return claim.make_sge_claim(SETTINGS, spool, job, found)


def test_each_complex_counts_its_kind(site: Site) -> None:
    site.run(gpus(2), gpus(1, "gpu_a100"), gpus(3, "mig_3g"), gpus(9, "slots"))
    assert kinds(site) == (("", 2), ("model:a100*", 1), ("mig:3g.40gb", 3))
    assert wanted(site).kinds == kinds(site)


@pytest.mark.parametrize("names", [("gpu", "gpuj"), ("gpu_a100", "gpu_job"), ("gpu", "gpu")])
def test_one_kind_is_asked_for_once(site: Site, names: tuple[str, str]) -> None:
    site.run(gpus(1, names[0]), gpus(1, names[1]))
    assert why_refused(site) == f"GPUs are asked for twice ({', '.join(names)})"


def test_shares_are_counted_and_come_alone(site: Site) -> None:
    site.run(gpus(2, "gpu_share"))
    found = wanted(site)
    assert (found.count, found.share, found.kinds) == (2, True, ())
    site.run(gpus(1, "gpu_share"), gpus(1), pid=501, job_id=13)
    assert why_refused(site) == "a share and other GPUs are asked for in one job"


def test_a_parallel_job_is_counted_by_slot_or_by_job_not_both(site: Site) -> None:
    two = gpus(1, "gpu", PER_SLOT), gpus(1, "gpu_job", PER_JOB)
    site.run(*two)
    assert kinds(site) == (("", 1), ("model:a100*", 1))
    site.run(*two, pe="mpi", hosts=(("node", 2),), pid=501, job_id=13)
    assert why_refused(site) == "gpu, gpu_job are counted by job and by slot"
