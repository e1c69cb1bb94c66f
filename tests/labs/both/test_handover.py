# SPDX-License-Identifier: Apache-2.0
"""A GPU goes from job to job, its memory told by a real exporter."""

from __future__ import annotations

import shutil

import pytest

from gpulock.daemon.health.findings import MIB
from gpulock.node.sample import Sample
from tests.labs.both.site import Site
from tests.labs.common.exporter_node import exporter
from tests.labs.common.installed import out_of_service
from tests.labs.common.processes import eldest
from tests.labs.daemon.daemon_lab import daemon_on
from tests.nvml.double import Process
from tests.support.wait import wait_ended, wait_until

pytestmark = pytest.mark.lab
USED, LEFT = 3072, 812  # MiB: of a job at work, and when its process is gone
KEYS = {"LEFTOVER_PROCESSES": "kill", "SAMPLE_PERIOD": "0.4", "QUARANTINE_ON": "memory"}


def test_an_epilog_frees_a_device_whose_memory_stays_and_gpulockd_puts_it_out_until_it_is_clean(
    site: Site,
) -> None:
    place = site.gpus.cluster.lab / "handover"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    site.configure(**KEYS)
    index = {device.id: device.index for device in site.gpus.node(site.node).devices()}

    def shows_all(sample: Sample) -> bool:
        return index.keys() <= sample.devices.keys()

    with exporter(site.gpus, site.node, place, shows_all) as observer:

        def use(device: str, mib: int, *processes: Process) -> None:
            observer.nvml.set(f"gpu{index[device]}.memory.used", mib * MIB)
            observer.nvml.processes(index[device], [*processes])

        def is_used(device: str) -> bool:
            sample = observer.sample()
            assert sample is not None
            seen = sample.devices[device]
            return (seen.memory_used, seen.processes) == (USED * MIB, 1)

        def out() -> dict[str, str]:
            return out_of_service(str(site.state_dir))

        go, until_go = site.waiting("go")
        job = site.start(1, until_go)
        (device,) = site.held(job)
        shell = eldest(lambda: site.processes(job))
        use(device, USED, Process(shell, f"{USED}M"))
        wait_until(lambda: is_used(device), why=f"the exporter to tell of {shell} on {device}")
        go.touch()
        wait_ended([shell], why="the job's process to end")
        use(device, LEFT)
        site.wait_over(job)
        assert (site.locks(), out()) == ({}, {})
        with daemon_on(site.gpus, site.node) as daemon:
            reason = {device: f"memory: {LEFT} MiB are in use without a process"}
            daemon.rounds_until(lambda: out() == reason, "it to be out")
            daemon.goes_round()  # what put it out is over, and has freed it
            assert site.locks() == {}
            assert device not in site.held(site.start(site.count - 1))
            use(device, 0)
            daemon.rounds_until(lambda: out() == {}, "it to be back")
            daemon.goes_round()
            assert site.held(site.start(1)) == [device]
