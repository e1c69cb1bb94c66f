# SPDX-License-Identifier: Apache-2.0
"""Ordinary jobs of a real scheduler get GPUs that nobody else has, and are told so."""

from __future__ import annotations

import pytest

from tests.labs.both.conftest import EVERY
from tests.labs.both.site import Site
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
SHOW = "env | grep -E '^(CUDA|NVIDIA|GPU|SGE_GPU|APPTAINERENV|SINGULARITYENV)'\necho shown\n"
MASKS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")


def variables(site: Site, job: int) -> dict[str, str]:
    """Wait until a job has shown its environment; return that."""
    said = site.wait_said(job, "shown\n")
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)


@pytest.mark.short
@EVERY
def test_a_job_gets_two_gpus_with_every_variable_of_the_contract_and_gives_them_back(
    site: Site,
) -> None:
    go, until_go = site.waiting("go")
    job = site.start(2, SHOW + until_go)
    seen = variables(site, job)
    locks = site.gpus.locks(site.node).values()
    uid = site.gpus.cluster.users[site.alice].uid
    assert [(one.job_id, one.user, one.uid) for one in locks] == [(str(job), site.alice, uid)] * 2
    held = site.held(job)
    devices = [device for device in site.gpus.node(site.node).devices() if device.id in held]
    assert seen["CUDA_VISIBLE_DEVICES"] == ",".join(str(device.index) for device in devices)
    assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    uuids = ",".join(device.uuid for device in devices)
    assert seen["GPULOCK_DEVICES"] == seen["NVIDIA_VISIBLE_DEVICES"] == uuids
    for name in MASKS:
        assert seen[f"APPTAINERENV_{name}"] == seen[f"SINGULARITYENV_{name}"] == seen[name]
    go.touch()
    site.wait_over(job)
    assert site.locks() == {}
    assert site.in_service()


@EVERY
def test_a_job_that_asked_for_none_sees_none_and_holds_none(site: Site) -> None:
    go, until_go = site.waiting("go")
    job = site.submit(0, SHOW + until_go)
    seen = variables(site, job)
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["NVIDIA_VISIBLE_DEVICES"]) == ("", "void")
    assert site.locks() == {}
    go.touch()


def test_tasks_of_an_array_hold_different_gpus(site: Site) -> None:
    go, until_go = site.waiting("go")
    job = site.submit(site.count // 2, until_go, tasks=2)
    wait_until(lambda: len(site.tasks(job)) == 2, why="both to run")
    assert len({*site.held_by_task(job, 1), *site.held_by_task(job, 2)}) == site.count
    go.touch()
    site.wait_empty()


@pytest.mark.short
def test_a_job_that_its_scheduler_sends_where_all_gpus_are_locked_runs_later(site: Site) -> None:
    """The scheduler's count knows no lock: the hook has the last word."""
    holder = site.start(site.count)
    with site.believing():
        job = site.submit(1, SHOW, user=site.bob)
        assert f"busy: 1 GPU asked for, 0 of {site.count} free" in site.wait_sent_back(job)
        assert site.in_service()
        site.end(holder)
        site.begin(job)
        assert variables(site, job)["CUDA_VISIBLE_DEVICES"] == "0"
        site.wait_over(job)
    assert site.locks() == {}
