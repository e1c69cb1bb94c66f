# SPDX-License-Identifier: Apache-2.0
"""A process that hangs with its memory map locked, by a real kernel: none hangs with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.simulate.node import write_simulated_node
from tests.labs.daemon.hung_memory import hung_process

pytestmark = pytest.mark.lab
UID = 65533
JOB = {"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "n1", "PATH": "/usr/bin:/bin"}
LOOK = """\
import sys
from gpulock.alloc.job_processes import find_job_processes
from gpulock.alloc.process_scan import ProcessScan
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.node.procfs import Proc
from gpulock.node.settings_file import read_settings
from gpulock.slurm.steps import SlurmSteps
words = dict(scheduler="slurm", node="n", slurmd="n1", task_id="", token="t", boot_id="b")
settings = read_settings(sys.argv[1])
settings.simulation = ""
for uid in (int(sys.argv[2]), int(sys.argv[2]) - 1):
    lock = Lock("0000:01:00.0", Owner(job_id="77", uid=uid, **words), "")
    job = find_job_processes(lock, ProcessScan(Proc()), SlurmSteps(settings).add_members)
    print(job.reason() or "nothing")
"""


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[int]:
    tmp_path.chmod(0o755)
    for place in tmp_path.parents:
        if place.stat().st_mode & 0o005 != 0o005:
            place.chmod(place.stat().st_mode | 0o055)
    with hung_process(tmp_path, JOB, UID) as pid:
        yield pid


def test_what_is_left_of_a_job_is_told_although_its_memory_cannot_be_read(
    hung: int, tmp_path: Path
) -> None:
    with pytest.raises(subprocess.TimeoutExpired):  # so it is for a process that simply reads it
        subprocess.run(["cat", f"/proc/{hung}/environ"], timeout=2, check=False)
    node = write_simulated_node(tmp_path / "node", "dgx1")
    command = [sys.executable, "-c", LOOK, str(node.config), str(UID)]
    done = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True)
    own, others = done.stdout.splitlines()
    assert f"process {hung} hangs" in own
    assert others == "nothing"
