# SPDX-License-Identifier: Apache-2.0
"""How many GPUs of this host: a whole number, or a refusal, never a guess of none."""

from __future__ import annotations

import math
import os

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.node.settings import Settings
from gpulock.sge import claim, request, spool
from gpulock.sge.spooled_job import SgeJob
from tests.support.faults import refusal
from tests.support.jobs import Site, gpus
from tests.support.packed_job import PER_JOB, PER_SLOT

OF_KINDS = "gpu gpu_a100=model:a100* mig_3g=mig:3g.40gb gpu_share=share gpuj gpu_job=model:a100*"
SETTINGS = Settings({"SGE_COMPLEXES": OF_KINDS})


def kinds(site: Site) -> tuple[tuple[str, int], ...]:
    return request.read_sge_job_gpus(site.above(site.pid), SETTINGS)[0]


@pytest.mark.parametrize("value", [1.5, 0.1, -1.0, -0.5, math.nan, math.inf, -math.inf, 1e18])
def test_a_fractional_or_negative_gpu_count_is_invalid(value: float) -> None:
    job = SgeJob(12, "alice", 1000, [("gpu", value, PER_SLOT)])
    refused = refusal(lambda: request.count_gpus_by_kind(job, SETTINGS, "node", None))
    assert refused.kind == INVALID_REQUEST


def test_a_task_of_an_array_has_its_own_file(site: Site) -> None:
    site.run(gpus(3), job_id=123456789, task_id=7)
    assert kinds(site) == (("", 3),)


@pytest.mark.parametrize("field", [{"job_id": 13}, {"owner": "mallory"}])
def test_a_file_of_another_job_or_owner_is_not_believed(
    site: Site, field: dict[str, object]
) -> None:
    job = site.run(gpus(1), owner="alice")
    about: dict[str, object] = {"job_id": 12, "owner": "alice", "name": "x", **field}
    other = Site(site.root / "other").spool(gpus(4), **about)
    job.job_file.write_bytes(other.job_file.read_bytes())
    assert refusal(lambda: kinds(site)).kind == UNKNOWN


def test_a_host_file_without_end_or_none_is_refused(site: Site) -> None:
    hosts = site.run(gpus(1), pe="mpi").folder / "pe_hostfile"
    os.truncate(hosts, 1 << 33)
    for kind in (INVALID_REQUEST, UNKNOWN):
        assert refusal(lambda: spool.count_sge_job_hosts(site.above())).kind == kind
        hosts.unlink(missing_ok=True)


# --- by kind: which complex counts what, several of them in one job -------------------------------


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
