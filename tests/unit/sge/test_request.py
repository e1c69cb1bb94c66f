# SPDX-License-Identifier: Apache-2.0
"""How many GPUs of this host: a whole number, or a refusal, never a guess of none."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.node.settings import Settings
from gpulock.sge import request, spool
from gpulock.sge.spooled_job import SgeJob
from tests.support.jobs import Site, gpus
from tests.support.packed_job import NOT_CONSUMABLE, PER_JOB, PER_SLOT

COMPLEXES = ("gpu", "gpuj")


def count(*requests: tuple[str, float, int], slots: "int | None" = None) -> int:
    job = SgeJob(12, "alice", 1000, list(requests))
    settings = Settings({"SGE_COMPLEXES": " ".join(COMPLEXES)})
    return sum(n for _, n in request.count_gpus_by_kind(job, settings, "node", slots))


def refused(*requests: tuple[str, float, int], slots: "int | None" = None) -> str:
    with pytest.raises(Refusal) as caught:
        count(*requests, slots=slots)
    return caught.value.kind


def test_none_asked_for_is_none() -> None:
    assert count() == 0
    assert count(("h_rt", 100.0, 0), ("mygpu", 5.0, 1), ("gpu2", 3.0, 1)) == 0


@pytest.mark.parametrize(
    ("value", "asked"), [(0.0, 0), (-0.0, 0), (1.0, 1), (16.0, 16), (1024.0, 1024)]
)
def test_whole_numbers_are_taken(value: float, asked: int) -> None:
    assert count(("gpu", value, PER_SLOT)) == asked


@pytest.mark.parametrize("value", [1.5, 0.1, -1.0, -0.5, math.nan, math.inf, -math.inf, 1e18])
def test_a_fractional_or_negative_gpu_count_is_invalid(value: float) -> None:
    assert refused(("gpu", value, PER_SLOT)) == INVALID_REQUEST


def test_a_per_slot_complex_is_taken_once_a_slot_and_a_per_job_one_once() -> None:
    assert count(("gpu", 2.0, PER_SLOT), slots=3) == 6
    assert count(("gpuj", 2.0, PER_JOB), slots=3) == 2


@pytest.mark.parametrize("flag", [NOT_CONSUMABLE, 3, 255])
def test_a_complex_that_is_no_consumable_cannot_be_counted(flag: int) -> None:
    assert refused(("gpu", 1.0, flag)) == UNKNOWN


@pytest.mark.parametrize(
    ("job", "path"),
    [
        ("4", "jobs/00/0000/0004.1"),
        ("123456789", "jobs/01/2345/6789.1"),
        ("9999999", "jobs/00/0999/9999.1"),
    ],
)
def test_the_file_of_a_job_is_where_execd_puts_it(job: str, path: str) -> None:
    assert request.execd_job_path(job, "1") == path


def asked(site: Site) -> int:
    settings = Settings({"SGE_COMPLEXES": "gpu gpuj"})
    kinds, _ = request.read_sge_job_gpus(site.above(), settings)
    return sum(number for _, number in kinds)


def test_the_slots_of_this_host_count_not_those_of_all(site: Site) -> None:
    site.run(gpus(1), gpus(9, "h_rt", NOT_CONSUMABLE), pe="mpi", hosts=(("node", 2), ("other", 6)))
    assert asked(site) == 2
    assert spool.count_sge_job_hosts(site.above()) == 2


def test_a_task_of_an_array_has_its_own_file(site: Site) -> None:
    site.run(gpus(3), job_id=123456789, task_id=7)
    assert asked(site) == 3


@pytest.mark.parametrize("field", [{"job_id": 13}, {"owner": "mallory"}])
def test_a_file_of_another_job_or_owner_is_not_believed(
    site: Site, field: dict[str, object]
) -> None:
    job = site.run(gpus(1), owner="alice")
    about: dict[str, object] = {"job_id": 12, "owner": "alice", "name": "x", **field}
    other = Site(site.root / "other").spool(gpus(4), **about)
    job.job_file.write_bytes(other.job_file.read_bytes())
    with pytest.raises(Refusal) as caught:
        asked(site)
    assert caught.value.kind == UNKNOWN


def test_a_file_that_is_garbage_or_a_fifo_is_unknown_and_not_asked_for_elsewhere(
    site: Site,
) -> None:
    job = site.run(gpus(1))
    job.job_file.write_bytes(b"garbage")
    for _ in range(2):
        with pytest.raises(Refusal) as caught:
            asked(site)
        assert caught.value.kind == UNKNOWN
        job.job_file.unlink()
        os.mkfifo(job.job_file)


@pytest.mark.timeout(20)
def test_a_host_file_without_end_a_pipe_a_link_or_none_is_refused(
    site: Site, tmp_path: Path
) -> None:
    hosts = site.run(gpus(1), pe="mpi").folder / "pe_hostfile"
    (tmp_path / "hosts").write_text("node 1 a.q@node U\n")
    for kind in ("endless", "pipe", "link", "gone"):
        hosts.unlink()
        if kind == "pipe":
            os.mkfifo(hosts)
        elif kind == "link":
            hosts.symlink_to(tmp_path / "hosts")
        elif kind == "endless":
            hosts.touch()
            os.truncate(hosts, 1 << 33)
        with pytest.raises(Refusal):
            spool.count_sge_job_hosts(site.above())


def test_one_host_twice_in_the_host_file_is_one_host(site: Site) -> None:
    job = site.run(gpus(1), pe="mpi")
    (job.folder / "pe_hostfile").write_text("node 1 a.q@node U\nnode 2 b.q@node U\n\n")
    assert spool.count_sge_job_hosts(site.above()) == 1
