# SPDX-License-Identifier: Apache-2.0
"""Quarantine by policy on a real Slurm: nobody gets the device; a drain by the page's program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.labs.common.exporter_node import PLACE
from tests.labs.common.installed import STATE_DIR, out_of_service, reap
from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import held, started, wait_requeued
from tests.labs.slurm.modes import NODE, Mode, by_gpulock, by_slurm
from tests.support.samples import HERE

pytestmark = pytest.mark.lab
KEYS = {
    "QUARANTINE_ON": "xid memory",
    "SAMPLE_PERIOD": "0.4",
}


def devices(gpus: Gpulock) -> list[str]:
    """Return the lock ids of the node's devices."""
    return [device.id for device in gpus.node(NODE).devices()]


def out(gpus: Gpulock) -> set[str]:
    """Return the devices that are out of service."""
    return {*out_of_service(str(gpus.slurm.path_in(NODE, STATE_DIR)))}


def test_the_pages_health_check_drains_the_node_and_resumes_what_it_drained(
    slurm_gpus: Gpulock,
) -> None:
    by_gpulock(slurm_gpus, KEYS)
    reap(slurm_gpus, NODE)
    slurm = slurm_gpus.slurm
    page = (Path(__file__).parents[3] / "docs/quarantine.md").read_text()
    program = re.search(r"```\n(#!/bin/sh\n.*?)```", page, re.DOTALL)
    assert program

    def check() -> tuple[bool, str]:
        done = slurm.run_in(NODE, ["sh", "-c", program[1]])
        assert done.returncode == 0, done.stderr
        return "DRAIN" in slurm.node_words(NODE), slurm.node_state(NODE)[1]

    assert check()[0] is False
    slurm_gpus.command(NODE, "quarantine", "1", "--reason", "its fan died")
    ours = "gpulock: a GPU is out of service"
    assert [check(), check()] == [(True, ours)] * 2
    slurm_gpus.command(NODE, "restore", "1")
    assert check()[0] is False
    slurm.scontrol("update", f"nodename={NODE}", "state=drain", "reason=new cooling")
    assert check() == (True, "new cooling")
    slurm.resume_node(NODE)


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
    head = ["gpulock-inventory 1", f"boot_id={HERE.read_text().strip()}"]
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
