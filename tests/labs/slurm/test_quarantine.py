# SPDX-License-Identifier: Apache-2.0
"""Quarantine by policy on a real Slurm: nobody gets the device; a drain of ours, and no other."""

from __future__ import annotations

import pytest

from gpulock.daemon.slots.slurm import PREFIX
from tests.labs.common.installed import STATE_DIR, out_of_service, reap
from tests.labs.common.told import BOOT, PLACE, exporter
from tests.labs.daemon.daemon_lab import Daemon, daemon_on
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import held, started, wait_requeued
from tests.labs.slurm.modes import NODE, Mode, by_gpulock, by_slurm

pytestmark = pytest.mark.lab
KEYS = {
    "QUARANTINE_ON": "xid memory",
    "SAMPLE_PERIOD": "0.4",
}
USED = f"memory_used={3 << 30}"


def devices(gpus: Gpulock) -> list[str]:
    """Return the lock ids of the node's devices."""
    return [device.id for device in gpus.node(NODE).devices()]


def out(gpus: Gpulock) -> set[str]:
    """Return the devices that are out of service."""
    return {*out_of_service(str(gpus.slurm.path_in(NODE, STATE_DIR)))}


def wait_drained(gpus: Gpulock, daemon: Daemon, drained: bool) -> str:
    """Wait until the node is drained, or is not; return the reason."""
    daemon.rounds_until(
        lambda: ("DRAIN" in gpus.slurm.node_words(NODE)) is drained, f"drained: {drained}"
    )
    return gpus.slurm.node_state(NODE)[1]


def test_a_node_is_drained_with_the_reason_and_resumed_when_its_device_is_clean(
    slurm_gpus: Gpulock,
) -> None:
    by_gpulock(slurm_gpus, {**KEYS, "SLURM_ON_UNHEALTHY": "drain"})
    reap(slurm_gpus, NODE)
    slurm, names = slurm_gpus.slurm, devices(slurm_gpus)
    place = slurm.path_in(NODE, PLACE)
    with exporter(place, names) as told, daemon_on(slurm_gpus, NODE) as daemon:
        job = started(slurm_gpus, NODE, "--gres=gpu:1")
        free = next(name for name in names if name not in slurm_gpus.held_by(job)[NODE])
        told.tell(free, USED)
        daemon.rounds_until(lambda: out(slurm_gpus) == {free}, "it to be out")
        reason = wait_drained(slurm_gpus, daemon, drained=True)
        assert reason.startswith(f"{PREFIX}{free}: memory: 3072 MiB are in use")
        assert slurm.state(job) == "RUNNING"
        told.tell(free)
        daemon.rounds_until(lambda: not out(slurm_gpus), "it to be back")
        wait_drained(slurm_gpus, daemon, drained=False)
        assert slurm.state(job) == "RUNNING"
        started(slurm_gpus, NODE, "--gres=gpu:3")


def test_an_administrators_drain_and_resume_stand(slurm_gpus: Gpulock) -> None:
    by_gpulock(slurm_gpus, {**KEYS, "SLURM_ON_UNHEALTHY": "drain"})
    reap(slurm_gpus, NODE)
    slurm = slurm_gpus.slurm
    with daemon_on(slurm_gpus, NODE) as daemon:
        slurm_gpus.command(NODE, "quarantine", "1", "--reason", "its fan died")
        assert "its fan died" in wait_drained(slurm_gpus, daemon, drained=True)
        slurm.resume_node(NODE)
        daemon.rounds_until(
            lambda: "gpulock does not change it" in daemon.said(), "gpulockd to see it"
        )
        assert "DRAIN" not in slurm.node_words(NODE)
        slurm.scontrol("update", f"nodename={NODE}", "state=drain", "reason=new cooling")
        slurm_gpus.command(NODE, "restore", "1")
        over = "no longer: the node was resumed by hand"
        daemon.rounds_until(lambda: over in daemon.said(), "gpulockd to forget it")
        assert slurm.node_state(NODE)[1] == "new cooling"


@pytest.mark.attack
@pytest.mark.parametrize("mode", [by_gpulock, by_slurm])
def test_an_exporter_that_calls_every_gpu_split_takes_no_node_out(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    """Tried: `gpu.BUS.mig=1` for each card, in the inventory of the exporter's user.

    Stopped by: MIG mode without an instance is believed of half of the cards; a job that needs more
    waits, and neither the Prolog nor gpulockd calls the node faulty.
    """
    mode(slurm_gpus, {**KEYS, "QUARANTINE_ON": "xid missing memory"})
    reap(slurm_gpus, NODE)
    slurm, names = slurm_gpus.slurm, devices(slurm_gpus)
    told, published = (slurm.path_in(NODE, f"{d}/inventory") for d in (PLACE, "/run/gpulock"))
    told.parent.mkdir(parents=True, exist_ok=True)
    head = ["gpulock-inventory 1", f"boot_id={BOOT.read_text().strip()}"]
    with daemon_on(slurm_gpus, NODE) as daemon:
        daemon.goes_round()
        told.write_text("\n".join([*head, *[f"gpu.{one}.mig=1" for one in names]]) + "\n")
        try:
            daemon.rounds_until(
                lambda: published.exists() and published.read_text().count("mig=1") == 2,
                "half of it to be published",
            )
            four = slurm.submit("slalice", "-w", NODE, "--gres=gpu:4", script="true\n")
            wait_requeued(slurm_gpus, four)
            slurm.scancel(four)
            daemon.goes_round()
            assert out(slurm_gpus) == set()
            assert "DRAIN" not in slurm.node_words(NODE)
            if mode is by_gpulock:
                assert len(held(slurm_gpus, started(slurm_gpus, NODE, "--gres=gpu:2"), NODE)) == 2
            daemon.goes_round()
        finally:
            told.unlink()
            published.unlink(missing_ok=True)
