# SPDX-License-Identifier: Apache-2.0
"""The kernel keeps a job of a real Grid Engine to its own GPUs; no daemon of gpulock's runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs.common.device_nodes import opened
from tests.labs.common.installed import gate_file, reap
from tests.labs.sge.cluster import NODES
from tests.labs.sge.confined import Site
from tests.labs.sge.gpulock import GPUS
from tests.labs.sge.install import INSTALLATION
from tests.labs.sge.jobs import wait_said, waiting_for
from tests.labs.sge.test_parallel import MPI, slave_tasks
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE = NODES[0]
ALL = {f"nvidia{n}" for n in range(GPUS)}


def test_a_command_of_qrsh_opens_its_own_gpus_and_no_other(site: Site) -> None:
    """Without shepherd_cmd any prolog breaks a terminal of 8.1.9, and the lack of one elsewhere."""
    words = [] if INSTALLATION.is_ocs else ["-pty", "no"]
    asked = (*words, "-q", "gpu.q", "-l", f"h={NODE},gpu=3")
    done = site.gpus.sge.qrsh("glalice", *asked, *site.probe.split())
    seen = opened(done.stdout)
    assert (len(seen["ENXIO"]), len(seen["EPERM"])) == (3 + 1, GPUS - 3), done.stderr


@pytest.mark.attack
@pytest.mark.parametrize("slots", [("mpi", "6"), ("smp", "2")])
def test_a_parallel_job_whose_tasks_nothing_confines_does_not_start(
    site: Site, slots: tuple[str, str]
) -> None:
    """Tried: a parallel job, whose tasks execd starts outside of the job's cgroup.

    Stopped by: without shepherd_cmd such a job is refused.
    """
    without = ("-j", "y", "-q", "gpu.q", "-masterq", f"gpu.q@{NODE}", "-pe", *slots)
    job = site.gpus.sge.submit("glalice", *without, stdin="echo started\n")
    site.gpus.sge.wait_state(job, "Eqw")
    text = wait_said(site.gpus, job, "nothing would keep its tasks")
    assert "started" not in text
    assert site.left() == []
    site.gpus.sge.qdel(str(job))


@pytest.fixture
def parallel(site: Site) -> Iterator[Site]:
    """Let slave tasks of parallel jobs be confined on the node, and have GPUs on every one."""
    for node in NODES[1:]:
        site.gpus.configure(node, SGE_SLAVE_TASKS="yes")
    site.configure(SGE_SLAVE_TASKS="yes")
    with slave_tasks(site.gpus):
        yield site


@pytest.mark.attack
def test_a_task_of_a_job_of_one_host_opens_what_the_job_holds(parallel: Site) -> None:
    """Tried: `qrsh -inherit` to the job's own host: execd starts that shepherd outside of the job.

    Stopped by: `sge_shepherd` confines the task to what its job holds.
    """
    ask = f"qrsh -inherit {NODE} '{parallel.probe}'\necho over\n"
    job = parallel.submit("-pe", "smp", "2", "-l", "gpuj=1", script=ask)
    seen = opened(wait_said(parallel.gpus, job, "over"))

    assert {name for name in seen["ENXIO"] if name != "nvidiactl"} < ALL
    assert len(seen["ENXIO"]) == 2
    assert seen["EPERM"] == ALL - seen["ENXIO"]


def test_a_slave_task_opens_what_its_job_holds_on_its_own_host(parallel: Site) -> None:
    go = gate_file(parallel.gpus, "go")
    ask = f"qrsh -inherit {NODE} '{parallel.probe}'\necho over\n{waiting_for(go)}"
    job = parallel.gpus.sge.submit("glalice", "-j", "y", *MPI, stdin=ask)
    without = ("-j", "y", "-q", "gpu.q", "-pe", "mpi", "6")
    other = parallel.gpus.sge.submit("glalice", *without, stdin=ask)
    seen = opened(wait_said(parallel.gpus, job, "over"))
    none = opened(wait_said(parallel.gpus, other, "over"))
    own = parallel.own(job)
    assert len(own) == 2
    assert seen == {"ENXIO": own | {"nvidiactl"}, "EPERM": ALL - own}
    assert none == {"ENXIO": {"nvidiactl"}, "EPERM": ALL}
    go.touch()
    for ended in (job, other):
        parallel.gpus.sge.wait_done(ended)

    def nothing_left() -> bool:
        reap(parallel.gpus, NODE)
        return not parallel.left()

    wait_until(nothing_left, why="the reaper to remove what tasks have left")
