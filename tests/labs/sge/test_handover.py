# SPDX-License-Identifier: Apache-2.0
"""GPUs of a real Grid Engine from job to job, their memory told by a real exporter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

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
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import carriers, gate_file, group_of, held, on, waiting_for

pytestmark = pytest.mark.lab
NODE = NODES[0]


@pytest.fixture
def node(gpus: Gpulock) -> Iterator[Gpus]:
    """Observe a node for a test."""
    place = gpus.sge.lab / "handover"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    gpus.configure(NODE, EXPORTER_DIR=str(place / "exporter"), **KEYS)
    with observed(gpus, NODE, place) as found:
        yield found


def working(gpus: Gpulock, node: Gpus, name: str) -> Job:
    """Return a job of one GPU that uses memory."""
    go = gate_file(gpus, name)
    job = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=1"), stdin=waiting_for(go))
    gpus.sge.wait_running(job)
    (device,) = held(gpus, NODE, job)
    shell = eldest(lambda: carriers(group_of(gpus, NODE, job)))
    return node.work(Job(job, device, shell, go, lambda: gpus.sge.wait_done(job)))


def holding(gpus: Gpulock, count: int) -> list[str]:
    """Return the devices of a job that holds so many GPUs of the node."""
    words = on(NODE, "-l", f"gpu={count}")
    job = gpus.sge.submit("glalice", *words, stdin="exec sleep 600\n")
    gpus.sge.wait_running(job)
    return held(gpus, NODE, job)


def test_an_epilog_frees_a_device_whose_memory_stays_and_gpulockd_puts_it_out_until_it_is_clean(
    gpus: Gpulock, node: Gpus
) -> None:
    job = working(gpus, node, "go")
    assert_freed(node, job, LEFT)
    with daemon_on(gpus, NODE) as daemon:
        assert_put_away(node, job, daemon)
        assert job.device not in holding(gpus, GPUS - 1)
        node.rest(job.device, 0)
        wait_out(node, daemon, {})
        assert holding(gpus, 1) == [job.device]
