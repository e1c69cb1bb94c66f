# SPDX-License-Identifier: Apache-2.0
"""Another release of gpulock on a node of a real Grid Engine whose jobs begin, run and end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.install.installed import Installation
from gpulock.sge.card_map import format_card_map
from tests.labs.common.upgrade import JOBS, PREFIX, Package, UpgradedNode, upgrade_and_go_back
from tests.labs.sge.cluster import NODES
from tests.labs.sge.config import gid_range
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import on
from tests.labs.sge.lab import JobId
from tests.labs.slurm.journal import Journal

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
NODE = "glnode2"
SLOTS = JOBS + 20
# What starts a hook is of each release's own folder; the queue's line here is of neither.
LINE = (
    "root@/usr/bin/env -i PATH=/usr/bin:/bin JOB_ID=$job_id SGE_TASK_ID=$ja_task_id QUEUE=$queue"
    f" {PREFIX}/current/{{}}/sge"
)


class SgeNode(UpgradedNode):
    """One execution host."""

    def __init__(self, gpus: Gpulock, place: Path) -> None:
        super().__init__(gpus, NODE, Package(place), Journal(gpus.sge.lab / "journal"))
        self.sge = gpus.sge

    def submit(self, devices: int, script: str) -> int:
        asked = on(
            NODE,
            *(("-l", f"gpu={devices}") if devices else ()),
            "-o",
            "/dev/null",
        )
        # what the journal wants
        named = "#!/bin/bash\nSLURM_JOB_ID=$JOB_ID SLURMD_NODENAME=$HOSTNAME\n"
        return self.sge.submit("glalice", *asked, stdin=named + script)

    def wait_running(self, job: int) -> None:
        self.sge.wait_running(JobId(job))

    def wait_done(self, job: int) -> None:
        self.sge.wait_done(JobId(job))
        record = self.sge.acct(JobId(job))
        assert (record["failed"].split()[0], record["exit_status"]) == ("0", "0"), record

    def troubles(self) -> list[str]:
        states = self.sge.queue_states()
        return [state for node, state in states.items() if node == NODE and state]


@pytest.fixture
def roomy(gpus: Gpulock) -> Iterator[Gpulock]:
    """Give a test a host on which so many jobs run at the same time."""
    sge = gpus.sge
    sge.qconf("-rattr", "queue", "slots", str(SLOTS), f"gpu.q@{NODE}")
    sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots={SLOTS}")
    sge.set_conf("gid_range", "64000-64500", host=NODE)
    yield gpus
    sge.clear_jobs()
    sge.set_conf("gid_range", gid_range(sge.lab, NODES.index(NODE) + 1), host=NODE)
    sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16")
    sge.qconf("-purge", "queue", "slots", f"gpu.q@{NODE}")


def test_jobs_go_on_while_gpulock_is_upgraded_and_downgraded(
    roomy: Gpulock, tmp_path: Path
) -> None:
    node = SgeNode(roomy, tmp_path / "package")
    installed = format_card_map(NODE, {}, Installation(PREFIX).pairs())
    roomy.sge.path_in(NODE, "/var/lib/gpulock/sge-map").write_text(installed)
    roomy.sge.set_hooks(LINE.format("prolog"), LINE.format("epilog"), queues=["gpu.q"])

    upgrade_and_go_back(node, tmp_path, GPUS)
