# SPDX-License-Identifier: Apache-2.0
"""GPUs of a real Slurm from job to job, their memory told by a real exporter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.labs.daemon_lab import gpulockd
from tests.labs.handover_node import KEYS, LEFT, Gpus, observed, wait_out
from tests.labs.sge_wait import until
from tests.labs.slurm_gpulock import Gpulock
from tests.labs.slurm_jobs import gate_file, reap, running, started, waiting_for
from tests.labs.slurm_lab import JobId
from tests.labs.slurm_modes import NODE, by_gpulock

pytestmark = pytest.mark.lab
GPUS = 4


@pytest.fixture
def node(slurm_gpus: Gpulock) -> Iterator[Gpus]:
    """Observe a node for a test."""
    slurm = slurm_gpus.slurm
    place = slurm.lab / "handover"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    by_gpulock(slurm_gpus, {**KEYS, "EXPORTER_DIR": str(place / "exporter")})
    enter, root = slurm.machines[NODE].enter(), slurm.path_in(NODE, "/")
    devices = slurm_gpus.node(NODE).devices()
    with observed(place, slurm_gpus.drivers / NODE, enter, root, devices) as found:
        yield found


class Job:
    """A job of one GPU that uses memory until it is told to end."""

    def __init__(self, gpus: Gpulock, node: Gpus, name: str) -> None:
        self._gpus = gpus
        self._go = gate_file(gpus, name)
        self.id = started(gpus, NODE, "--gres=gpu:1", script=waiting_for(self._go))
        (self.device,) = gpus.held_by(self.id)[NODE]
        self._pid = min(gpus.slurm.job_processes(self.id, NODE))  # its shell
        node.work(self.device, self._pid)

    def end(self) -> None:
        """Let its process end."""
        self._go.touch()
        until(lambda: not running(self._pid), what="the job's process to end")

    def over(self) -> None:
        """Wait until its Epilog is over too."""
        self._gpus.slurm.wait_done(self.id)


def holding(gpus: Gpulock, count: int) -> JobId:
    """Return a job that holds so many GPUs of the node."""
    return started(gpus, NODE, f"--gres=gpu:{count}")


def test_memory_that_is_given_back_lets_the_epilog_free_the_device(
    slurm_gpus: Gpulock, node: Gpus
) -> None:
    job = Job(slurm_gpus, node, "go")
    with node.unlisted():
        job.end()
        node.rest(job.device, 0)
        job.over()
    assert slurm_gpus.locks(NODE) == {}
    assert node.freed_as(job.device) == "epilog"
    assert node.out() == {}


def test_memory_that_stays_puts_the_device_out_until_it_is_clean_and_the_rest_goes_on(
    slurm_gpus: Gpulock, node: Gpus
) -> None:
    slurm = slurm_gpus.slurm
    job = Job(slurm_gpus, node, "go")
    lock_dir, enter = slurm.path_in(NODE, "/run/gpulock"), slurm.machines[NODE].enter()
    with node.unlisted():
        job.end()
        node.rest(job.device, LEFT)
        job.over()
        assert node.settling(job.device)
    with gpulockd(enter, lock_dir, slurm.lab / "gpulockd.log") as daemon:
        wait_out(node, daemon, {job.device: f"memory: {LEFT} MiB stay in use after job {job.id}"})
        assert slurm_gpus.locks(NODE) == {}
        others = holding(slurm_gpus, GPUS - 1)
        assert job.device not in slurm_gpus.held_by(others)[NODE]
        node.rest(job.device, 0)
        wait_out(node, daemon, {})
        assert slurm_gpus.held_by(holding(slurm_gpus, 1))[NODE] == [job.device]


def test_without_the_exporter_open_files_decide_and_the_record_says_so(
    slurm_gpus: Gpulock, node: Gpus
) -> None:
    first, second = Job(slurm_gpus, node, "first"), Job(slurm_gpus, node, "second")
    node.observer.crash()
    first.end()
    first.over()
    assert node.settling(first.device), "its last look is of before the job's end"
    node.wait_stale()
    second.end()
    second.over()
    assert node.freed_as(second.device) == "epilog (no exporter told its memory)"
    assert {act for act, _ in reap(slurm_gpus, NODE).acts()} == {"freed"}
    assert node.freed_as(first.device).startswith("reap: ")
    assert node.freed_as(first.device).endswith(" (no exporter told its memory)")
    assert node.out() == {}
