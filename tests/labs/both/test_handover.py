# SPDX-License-Identifier: Apache-2.0
"""GPUs from job to job, their memory told by a real exporter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.labs.both.site import Site
from tests.labs.common.handover_node import (
    KEYS,
    LEFT,
    Gpus,
    Job,
    assert_freed,
    assert_put_away,
    observed,
    wait_out,
)
from tests.labs.common.processes import eldest
from tests.labs.daemon.daemon_lab import daemon_on

pytestmark = pytest.mark.lab


@pytest.fixture
def node(site: Site) -> Iterator[Gpus]:
    """Observe a node for a test."""
    place = site.gpus.cluster.lab / "handover"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    site.configure(**KEYS)
    with observed(site.gpus, site.node, place) as seen:
        yield seen


def working(site: Site, node: Gpus, name: str) -> Job:
    """Return a job of one GPU that uses memory."""
    go, until_go = site.waiting(name)
    job = site.start(1, until_go)
    (device,) = site.held(job)
    shell = eldest(lambda: site.processes(job))
    return node.work(Job(job, device, shell, go, lambda: site.wait_over(job)))


def test_an_epilog_frees_a_device_whose_memory_stays_and_gpulockd_puts_it_out_until_it_is_clean(
    site: Site, node: Gpus
) -> None:
    job = working(site, node, "go")
    assert_freed(node, job, LEFT)
    with daemon_on(site.gpus, site.node) as daemon:
        assert_put_away(node, job, daemon)
        assert job.device not in site.held(site.start(site.count - 1))
        node.rest(job.device, 0)
        wait_out(node, daemon, {})
        assert site.held(site.start(1)) == [job.device]
