# SPDX-License-Identifier: Apache-2.0
"""Quarantine by policy: no job gets the device until it is clean, and the rest goes on."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.labs.both.conftest import EVERY
from tests.labs.both.site import Site
from tests.labs.common.exporter_node import PLACE
from tests.labs.common.installed import LOCK_DIR, out_of_service
from tests.labs.daemon.daemon_lab import daemon_on
from tests.support.samples import HERE, Sampled

pytestmark = pytest.mark.lab
KEYS = {"QUARANTINE_ON": "xid health", "SAMPLE_PERIOD": "0.4"}


def prepare(site: Site, **keys: str) -> list[str]:
    """Let the node hear an exporter; return the lock ids of its devices."""
    site.configure(**keys)
    reload_driver(site)
    site.reap()
    out(site)  # else the sample of a test before counts
    return [device.id for device in site.gpus.node(site.node).devices()]


def reload_driver(site: Site) -> None:
    """Let the node's driver have been loaded anew, as sysfs and the kernel's log show it."""
    module = site.gpus.drivers / site.node / "sys/module/nvidia"
    if module.exists():
        module.rename(module.with_name(f"unloaded{module.stat().st_ino}"))
    module.mkdir(parents=True)
    log_kernel(site, "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15")


def log_xid(site: Site, card: str) -> None:
    """Let the node's kernel log that a card has fallen off the bus."""
    log_kernel(site, f"NVRM: Xid (PCI:{card[:-2]}): 79, off the bus")


def log_kernel(site: Site, text: str) -> None:
    """Let the node's kernel log one more line."""
    log = site.gpus.drivers / site.node / "dev/kmsg"
    number = len(log.read_text().splitlines()) if log.exists() else 0
    at = time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6
    with log.open("a") as file:
        file.write(f"3,{number},{at:.0f},-;{text}\n")


def out(site: Site, **facts: int) -> set[str]:
    """Return what is out of service, and let the exporter have looked, with this of each card."""
    told = Sampled(site.gpus.cluster.path_in(site.node, PLACE))
    for device in site.gpus.node(site.node).devices():
        told.device(device.id, memory_used=0, processes=0, **facts)
    told.write()
    return {*out_of_service(str(site.state_dir))}


@pytest.mark.attack
def test_an_exporter_that_calls_every_gpu_bad_takes_half_of_the_node_out(site: Site) -> None:
    """Tried: a reset that each card waits for, in the sample of the exporter's user.

    Stopped by: root believes it of half of the node; a job gets the rest, and no node stops.
    """
    names = prepare(site, **KEYS)
    bad = partial(out, site, recovery_action=1)
    with daemon_on(site.gpus, site.node) as daemon:
        daemon.rounds_until(lambda: len(bad()) == site.count // 2, "half of it to be out")
        daemon.goes_round()
        assert len(bad()) == site.count // 2
        job = site.start(site.count // 2)
        assert {*site.held(job)} == {*names} - bad()
        assert site.in_service()


@pytest.mark.attack
@EVERY
def test_an_exporter_that_calls_every_gpu_split_takes_no_node_out(site: Site) -> None:
    """Tried: `gpu.BUS.mig=1` for each card, in the inventory of the exporter's user.

    Stopped by: MIG mode without an instance is believed of half of the cards; a job that needs more
    waits, and neither the prolog nor gpulockd calls the node faulty.
    """
    names = prepare(site, **{**KEYS, "QUARANTINE_ON": "xid missing health"})
    told, published = (
        site.gpus.cluster.path_in(site.node, f"{folder}/inventory") for folder in (PLACE, LOCK_DIR)
    )
    head = ["gpulock-inventory 1", f"boot_id={HERE.read_text().strip()}"]
    with daemon_on(site.gpus, site.node) as daemon:
        daemon.goes_round()
        told.write_text("\n".join([*head, *[f"gpu.{one}.mig=1" for one in names]]) + "\n")
        try:
            daemon.rounds_until(
                lambda: (
                    published.exists() and published.read_text().count("mig=1") == site.count // 2
                ),
                "half of it to be published",
            )
            site.refused(site.count)
            daemon.goes_round()
            assert out_of_service(str(site.state_dir)) == {}
            assert site.in_service()
            if not site.is_selected_by_slurm:
                assert len(site.held(site.start(site.count // 2))) == site.count // 2
            daemon.goes_round()
        finally:
            told.unlink()
            published.unlink(missing_ok=True)


def test_a_device_that_fails_under_a_job_goes_to_no_other_until_it_is_clean(site: Site) -> None:
    prepare(site, **KEYS)
    with daemon_on(site.gpus, site.node) as daemon:
        job = site.start(2)
        held = site.held(job)
        log_xid(site, held[0])
        daemon.rounds_until(lambda: out(site) == {held[0]}, f"{held[0]} to be out of service")
        assert site.held(job) == held
        site.end(job)
        other = site.start(site.count - 1, user=site.bob)
        assert held[0] not in site.held(other)
        site.end(other)
        assert "quarantined" in site.refused(site.count)
        assert site.in_service()
        reload_driver(site)
        daemon.rounds_until(lambda: not out(site), "it to be back in service")
        assert len(site.held(site.start(site.count))) == site.count
        said = daemon.said()
        assert said.count("is out of service") == said.count("is back in service") == 1, said
