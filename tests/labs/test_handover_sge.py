# SPDX-License-Identifier: Apache-2.0
"""GPUs of a real Grid Engine from job to job, their memory told by a real exporter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.labs.daemon_lab import gpulockd
from tests.labs.handover_node import KEYS, LEFT, Gpus, observed, wait_out
from tests.labs.sge_cluster import NODES
from tests.labs.sge_gpulock import GPUS, Gpulock
from tests.labs.sge_jobs import carriers, gate_file, group_of, held, on, reap, running, waiting_for
from tests.labs.sge_lab import JobId
from tests.labs.sge_wait import until

pytestmark = pytest.mark.lab
NODE = NODES[0]


@pytest.fixture
def node(gpus: Gpulock) -> Iterator[Gpus]:
    """Observe a node for a test."""
    place = gpus.sge.lab / "handover"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    gpus.configure(NODE, EXPORTER_DIR=str(place / "exporter"), **KEYS)
    enter, root = gpus.sge.machines[NODE].enter(), gpus.sge.path_in(NODE, "/")
    with observed(place, gpus.drivers / NODE, enter, root, gpus.node(NODE).devices()) as found:
        yield found


class Job:
    """A job of one GPU that uses memory until it is told to end."""

    def __init__(self, gpus: Gpulock, node: Gpus, name: str) -> None:
        self._gpus = gpus
        self._go = gate_file(gpus, name)
        words = on(NODE, "-l", "gpu=1")
        self.id = gpus.sge.submit("glalice", *words, stdin=waiting_for(self._go))
        gpus.sge.wait_running(self.id)
        (self.device,) = held(gpus, NODE, self.id)
        self._pid = min(carriers(group_of(gpus, NODE, self.id)))  # its shell
        node.work(self.device, self._pid)

    def end(self) -> None:
        """Let its process end."""
        self._go.touch()
        until(lambda: not running(self._pid), what="the job's process to end")

    def over(self) -> None:
        """Wait until its epilog is over too."""
        self._gpus.sge.wait_done(self.id)


def holding(gpus: Gpulock, count: int) -> JobId:
    """Return a job that holds so many GPUs of the node."""
    words = on(NODE, "-l", f"gpu={count}")
    job = gpus.sge.submit("glalice", *words, stdin="exec sleep 600\n")
    gpus.sge.wait_running(job)
    return job


def test_memory_that_is_given_back_lets_the_epilog_free_the_device(
    gpus: Gpulock, node: Gpus
) -> None:
    job = Job(gpus, node, "go")
    with node.unlisted():
        job.end()
        node.rest(job.device, 0)
        job.over()
    assert gpus.locks(NODE) == {}
    assert node.freed_as(job.device) == "epilog"
    assert node.out() == {}


def test_memory_that_stays_puts_the_device_out_until_it_is_clean_and_the_rest_goes_on(
    gpus: Gpulock, node: Gpus
) -> None:
    job = Job(gpus, node, "go")
    lock_dir, enter = gpus.sge.path_in(NODE, "/run/gpulock"), gpus.sge.machines[NODE].enter()
    with node.unlisted():
        job.end()
        node.rest(job.device, LEFT)
        job.over()
        assert node.settling(job.device)
    with gpulockd(enter, lock_dir, gpus.sge.lab / "gpulockd.log") as daemon:
        wait_out(node, daemon, {job.device: f"memory: {LEFT} MiB stay in use after job {job.id}"})
        assert gpus.locks(NODE) == {}
        assert job.device not in held(gpus, NODE, holding(gpus, GPUS - 1))
        node.rest(job.device, 0)
        wait_out(node, daemon, {})
        assert held(gpus, NODE, holding(gpus, 1)) == [job.device]


def test_without_the_exporter_open_files_decide_and_the_record_says_so(
    gpus: Gpulock, node: Gpus
) -> None:
    first, second = Job(gpus, node, "first"), Job(gpus, node, "second")
    node.observer.crash()
    first.end()
    first.over()
    assert node.settling(first.device), "its last look is of before the job's end"
    node.wait_stale()
    second.end()
    second.over()
    assert node.freed_as(second.device) == "epilog (no exporter told its memory)"
    assert reap(gpus, NODE).acts() == [("freed", "dead")]
    assert node.freed_as(first.device).startswith("reap: ")
    assert node.freed_as(first.device).endswith(" (no exporter told its memory)")
    assert node.out() == {}
