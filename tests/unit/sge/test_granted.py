# SPDX-License-Identifier: Apache-2.0
"""What Open Cluster Scheduler granted on this host is locked: no more, no less, no guess."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpulock.errors import INVALID_REQUEST, Refusal
from gpulock.node.settings import Settings
from gpulock.sge import granted, request
from gpulock.sge.card_map import MAP_NAME, format_card_map
from gpulock.sge.hook import JOB_ERROR, REQUEUE
from gpulock.sge.request import count_gpus_by_kind
from gpulock.sge.spooled_job import SgeJob, parse_spooled_job
from tests.support.faults import refusal
from tests.support.jobs import Site, variables
from tests.support.packed_job import JOBS, MASTER, SLAVE, Ask, Grant, ocs_job
from tests.support.trees import bus

SETTINGS = Settings({"SGE_COMPLEXES": "gpu gpuj gpuh card"})
RELEASES = sorted(JOBS)


def count(
    grants: tuple[Grant, ...], asks: tuple[Ask, ...] = (Ask("gpu", 1),), host: str = "node"
) -> int:
    job = parse_spooled_job(ocs_job(asks, grants))
    return sum(n for _, n in count_gpus_by_kind(job, SETTINGS, host, 2))


def test_gpus_of_two_scopes_on_one_host_are_counted_together() -> None:
    asks = (Ask("gpu", 1, scope=MASTER), Ask("gpu", 2, scope=SLAVE))
    assert count((Grant("gpu", 5),), asks) == 5


@pytest.mark.parametrize("amount", [1.5, -1.0, 1e300, float("nan"), float("inf"), 4097.0])
def test_an_amount_that_is_no_number_of_gpus_is_invalid(amount: float) -> None:
    assert refusal(lambda: count((Grant("gpu", amount),))).kind == INVALID_REQUEST


def test_a_request_that_no_host_granted_is_refused_and_never_none() -> None:
    """qmaster drops the whole list where a complex is a value of a queue, and starts the job."""
    with pytest.raises(Refusal, match="granted by no host") as caught:
        count((), (Ask("gpu", 2),))
    assert caught.value.kind == INVALID_REQUEST


def test_a_complex_of_the_global_host_is_refused() -> None:
    with pytest.raises(Refusal, match="global"):
        count((Grant("gpu", 2, "global"),))


@pytest.mark.parametrize("release", RELEASES)
def test_a_hook_reads_the_file_of_each_release(site: Site, release: str) -> None:
    data = ocs_job((Ask("gpu", 2),), (Grant("gpu", 2),), release)
    site.run(owner="alice").job_file.write_bytes(data)
    kinds, _ = request.read_sge_job_gpus(site.above(), SETTINGS)
    assert kinds == (("", 2),)


@pytest.mark.parametrize("pe", ["none", "smp"])
def test_a_job_of_one_host_waits_where_its_gpus_were_granted_under_another_name(
    site: Site, pe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would run with an empty mask and lock nothing, while qmaster counts its GPUs."""
    job = site.run(owner="alice", pe=pe, hosts=(("node", 2),))
    job.job_file.write_bytes(ocs_job((Ask("gpu", 2),), (Grant("gpu", 2, "node.example.org"),)))
    assert site.prolog(job, SGE_SLAVE_TASKS="yes") == REQUEUE
    assert "node.example.org" in capfd.readouterr().err
    assert site.locks() == []


def test_gpus_that_other_hosts_granted_need_their_tasks_locked(site: Site) -> None:
    """With none of them here as well: a slave task would run unmasked, and lock nothing."""
    hosts = (("node", 1), ("other", 1))
    job = site.run(owner="alice", pe="mpi", hosts=hosts)
    asks, there = (Ask("gpu", 1, scope=SLAVE),), (Grant("gpu", 1, "other"),)
    job.job_file.write_bytes(ocs_job(asks, there))
    assert (site.prolog(job), site.locks()) == (JOB_ERROR, [])
    assert site.prolog(job, SGE_SLAVE_TASKS="yes") == 0


@pytest.mark.parametrize("cards", [[bus(0), bus(0)], [bus(0)], [bus(0), bus(1), bus(2)]])
def test_ids_that_are_not_as_many_cards_as_were_granted_are_refused(
    monkeypatch: pytest.MonkeyPatch, cards: list[str]
) -> None:
    job = SgeJob(12, "alice", 1000, [])
    job.granted = [("gpu", 2.0, [("a", 1), ("b", 1)], "n1")]
    spool: Any = SimpleNamespace(need=lambda _: "n1")
    monkeypatch.setattr(granted, "resolve_card_ids", lambda *_: cards)
    assert refusal(lambda: granted.wanted_devices(spool, Settings({}), job)).kind == INVALID_REQUEST


# --- ids of an RSMAP: exactly the GPUs that were granted, by the administrator's map --------------

# As in the examples of Open Cluster Scheduler: the first one is GPU1.
CARDS = {("card", f"GPU{n + 1}"): bus(n) for n in range(4)} | {("old", "GPU0"): bus(0)}


@pytest.fixture
def mapped(site: Site) -> Site:
    site.state.mkdir(exist_ok=True)
    (site.state / MAP_NAME).write_text(format_card_map("node", CARDS))
    return site


def start(site: Site, *ids: str, job_id: int = 12, amount: float = 0, times: int = 1) -> int:
    """Run the prolog of a job that was granted these ids."""
    job = site.run(owner="alice", job_id=job_id)
    asks = (Ask("card", amount or len(ids)),)
    grants = (Grant("card", amount or len(ids), "node", tuple((one, times) for one in ids)),)
    job.job_file.write_bytes(ocs_job(asks, grants, job_id=job_id))
    return site.prolog(job, SGE_COMPLEXES="gpu card")


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
        (site.state / MAP_NAME).write_text(text)
    assert start(site, "GPU1") == JOB_ERROR
    assert site.locks() == []
