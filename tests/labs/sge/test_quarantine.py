# SPDX-License-Identifier: Apache-2.0
"""Quarantine by policy on a real Grid Engine: nobody gets the device, and no job comes in vain."""

from __future__ import annotations

import pytest

from tests.labs.common.installed import out_of_service
from tests.labs.common.told import PLACE, exporter
from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.sge import test_sensor
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import held, on, reap, visits
from tests.labs.sge.test_sensor import wait_reported

pytestmark = pytest.mark.lab
sensed = test_sensor.sensed  # a fixture
NODE = NODES[0]
SLEEP = "exec sleep 600\n"
KEYS = {"QUARANTINE_ON": "xid memory", "RESTORE_AFTER": "2", "PROCESS_PERIOD": "1"}


def configured(gpus: Gpulock) -> int:
    """Return how many GPUs qmaster has in the node's configuration."""
    shown = gpus.sge.qconf("-se", NODE).replace("\\\n", "")
    words = shown.partition("complex_values")[2].split()[0].split(",")
    return int(next(word[4:] for word in words if word.startswith("gpu=")))


def notes(gpus: Gpulock) -> dict[str, str]:
    """Return why each device of the node is out of service."""
    return out_of_service(str(gpus.sge.path_in(NODE, "/var/lib/gpulock")))


def names_of(gpus: Gpulock) -> list[str]:
    """Return the lock ids of the node's devices."""
    return [device.id for device in gpus.node(NODE).devices()]


def reload_driver(gpus: Gpulock) -> None:
    """Let the node's driver have been loaded anew, as sysfs shows it."""
    module = gpus.drivers / NODE / "sys/module/nvidia"
    if module.exists():
        module.rename(module.with_name(f"unloaded{module.stat().st_ino}"))
    module.mkdir(parents=True)


@pytest.mark.usefixtures("sensed")
def test_a_device_that_failed_goes_to_no_job_until_it_is_clean(
    gpus: Gpulock,
) -> None:
    place = gpus.sge.path_in(NODE, PLACE)
    gpus.configure(NODE, EXPORTER_DIR=PLACE, **KEYS)
    reload_driver(gpus)
    reap(gpus, NODE)
    with exporter(place, names_of(gpus)) as told, daemon_on(gpus, NODE) as daemon:
        wait_reported(gpus, hl_gpu_free=GPUS, hl_gpu_quarantined=0)
        first = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=2"), stdin=SLEEP)
        gpus.sge.wait_running(first)
        bad = held(gpus, NODE, first)[0]
        told.tell(bad, "x.79=1,100.0")

        def out() -> bool:
            found = notes(gpus)
            assert found in ({}, {bad: "xid: XID 79 (GPU has fallen off the bus)"})
            return bool(found)  # none while what is told is too old

        daemon.rounds_until(out, "the device to be put away")
        assert bad in held(gpus, NODE, first)
        wait_reported(gpus, hl_gpu_quarantined=1)
        assert configured(gpus) == GPUS
        gpus.sge.qdel(str(first))
        gpus.sge.wait_done(first)
        second = gpus.sge.submit("glbob", *on(NODE, "-l", f"gpu={GPUS - 1}"), stdin=SLEEP)
        whole = gpus.sge.submit("glalice", *on(NODE, "-l", f"gpu={GPUS}"), stdin=SLEEP)
        gpus.sge.wait_running(second)
        assert bad not in held(gpus, NODE, second)
        assert len(held(gpus, NODE, second)) == GPUS - 1
        gpus.sge.qdel(str(second))
        reload_driver(gpus)
        daemon.rounds_until(lambda: notes(gpus) == {}, "the device to come back")
        gpus.sge.wait_running(whole)
        assert len(held(gpus, NODE, whole)) == GPUS
        assert visits(gpus, whole) == []  # it was sent nowhere in vain
        said = daemon.said()
        assert said.count("is out of service") == said.count("is back in service") == 1, said
