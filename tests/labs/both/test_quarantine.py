# SPDX-License-Identifier: Apache-2.0
"""Quarantine by policy: an exporter that lies takes no more than half of a node out."""

from __future__ import annotations

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
    site.reap()
    out(site)  # else the sample of a test before counts
    return [device.id for device in site.gpus.node(site.node).devices()]


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
