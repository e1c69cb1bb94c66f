# SPDX-License-Identifier: Apache-2.0
"""The load sensor under a real execd: jobs wait where their prolog would have to refuse them."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import forget_conf, on, restart_execd
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE = NODES[0]
VALUES = ("gpu.free", "gpu.quarantined")
SLEEP = "exec sleep 600\n"


@pytest.fixture
def sensed(gpus: Gpulock) -> Iterator[Gpulock]:
    """Let execd of NODE run the load sensor."""
    for name in VALUES:
        gpus.sge.set_complex(f"{name} {name} INT <= YES NO 0 0")
    restart_execd(gpus, NODE, load_sensor=str(gpus.hooks.sensor))
    yield gpus
    gpus.sge.clear_jobs()
    forget_conf(gpus, NODE, "load_sensor")


def reported(gpus: Gpulock) -> dict[str, str]:
    """Return what `qhost -F` shows of the GPUs, `hl:gpu.free` by `7`."""
    names = ",".join(("gpu", "gpuj", *VALUES))
    text = gpus.sge.client("qhost", "-F", names, "-h", NODE).stdout
    words = [word for word in text.split() if word.startswith(("hl:", "hc:"))]
    return {word.partition("=")[0]: word.partition("=")[2].partition(".")[0] for word in words}


def wait_reported(gpus: Gpulock, **wanted: int | None) -> None:
    """Wait until `qhost -F` shows these values, `_` for `:` and `.`; None: it is not shown."""
    shown = {name: None if value is None else str(value) for name, value in wanted.items()}

    def there() -> bool:
        now = {key.replace(":", "_").replace(".", "_"): v for key, v in reported(gpus).items()}
        return all(now.get(name) == value for name, value in shown.items())

    wait_until(there, why=lambda: f"{wanted}\n{reported(gpus)!s}")


def sensor_users(gpus: Gpulock) -> set[int]:
    """Return the users whose processes run our sensor."""
    every = psutil.process_iter(["cmdline", "uids"], ad_value=())
    return {one.info["uids"].real for one in every if str(gpus.hooks.sensor) in one.info["cmdline"]}


def test_a_job_that_a_bad_device_leaves_no_room_for_waits_and_is_not_sent_back(
    sensed: Gpulock,
) -> None:
    wait_reported(sensed, hl_gpu_free=8, hl_gpu_quarantined=0)
    assert sensor_users(sensed) == {0}
    sensed.told(NODE, "quarantine", "7", "--reason", "its fan died")
    wait_reported(sensed, hl_gpu=7, hl_gpuj=7, hl_gpu_free=7, hl_gpu_quarantined=1)
    waiting = sensed.sge.submit("glalice", *on(NODE, "-l", "gpu=8"), stdin=SLEEP)
    served = sensed.sge.submit("glbob", *on(NODE, "-l", "gpu=2"), stdin=SLEEP)
    sensed.sge.wait_running(served)
    offers = f'cannot run at host "{NODE}" because it offers only hc:gpu='
    wait_until(
        lambda: offers in sensed.sge.qstat("-j", str(waiting)),
        why=lambda: "the scheduler to say why\n" + sensed.sge.qstat("-j", str(waiting)),
    )
    assert sensed.sge.state(waiting) == "qw"
    assert sensed.sge.visits(waiting) == []  # it was at no node
    wait_reported(sensed, hl_gpu=5, hl_gpu_free=5, hl_gpu_quarantined=1)
    sensed.told(NODE, "restore", "7")
    sensed.sge.qdel(str(served))
    sensed.sge.wait_running(waiting)
    assert len(sensed.held_by(waiting)[NODE]) == GPUS
    assert sensed.sge.visits(waiting) == []
    wait_reported(sensed, hl_gpu_free=0, hl_gpu_quarantined=0)
