# SPDX-License-Identifier: Apache-2.0
"""A program of a test's machine: jobs begin, run and end while its package is changed.

    python3 -m tests.install.job_load CHANGES SHORT LONG UPGRADE DOWNGRADE

The jobs are Grid Engine's, as tests/support plays them on the simulated node, with the hooks that
are in force. Short ones begin and end during each change, long ones live through two. After each
change it prints the version of the hooks in force; a job that does not begin or end ends it.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.support.execd import SimulatedJob, spool_job
from tests.support.packed_job import ResourceRequest
from tests.support.starter import Shepherd

CURRENT: Final = "/usr/lib/gpulock/hooks/current"
HOOKS: Final = (f"{CURRENT}/prolog/sge", f"{CURRENT}/epilog/sge")
NODE: Final = Path("/srv/node")
AT_ONCE: Final = 3  # short jobs
FIRST_GROUP: Final = 2_000_000  # execd gives each job one of gid_range
LOOKS: Final = 'while :; do for hook; do [ -x "$hook" ] || echo "$hook is missing"; done; done'
numbers = itertools.count(1)
held: set[str] = set()  # GPUs, by their number


class Job:
    """A job that runs until it is ended; every second one has a GPU."""

    def __init__(self) -> None:
        self.number = next(numbers)
        wanted = (ResourceRequest("gpu", 1.0, "1"),) * (self.number % 2)
        gid = FIRST_GROUP + self.number
        command = ("/bin/sleep", "infinity")
        job = SimulatedJob(self.number, command, resources=wanted, add_grp_id=gid)
        self._spooled = spool_job(NODE, job)
        self._shepherd = Shepherd(self._spooled)
        self._run_hook(HOOKS[0])
        mask = self._spooled.read_environment()["CUDA_VISIBLE_DEVICES"]
        self.devices = {*filter(None, mask.split(","))}
        assert len(self.devices) == len(wanted), mask
        assert not self.devices & held, "another job has it"
        held.update(self.devices)
        self._pid = self._shepherd.start_job()

    def end(self) -> None:
        """End it as qdel does, and run its epilog."""
        os.killpg(self._pid, signal.SIGKILL)
        self._shepherd.wait_job(self._pid)
        held.difference_update(self.devices)
        self._run_hook(HOOKS[1])
        self._shepherd.end()

    def _run_hook(self, hook: str) -> None:
        status = self._shepherd.run_hook(hook)
        assert status == 0, f"{hook} of {self.number}: {status}: {self._spooled.output.read_text()}"


def run_short_jobs(change: subprocess.Popen[str], least: int) -> None:
    """Run one job after another until a change of the package is over, and so many."""
    for count in itertools.count():
        if change.poll() is not None and count >= least:
            return
        Job().end()


def main(counts: list[str], commands: list[str]) -> None:
    """Change the package, by each command in turn."""
    changes, short, long = map(int, counts)
    running: list[Job] = []
    least = -(-short // changes // AT_ONCE)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(changes):
            begun = [Job() for _ in range(long // changes)]
            command = ["bash", "-ec", commands[number % len(commands)]]
            with open("/tmp/said", "w+") as said:
                change = subprocess.Popen(command, stdout=said, stderr=said, text=True)
                for done in [pool.submit(run_short_jobs, change, least) for _ in range(AT_ONCE)]:
                    done.result()
            assert change.returncode == 0, Path("/tmp/said").read_text()
            print(os.readlink(CURRENT), flush=True)
            for job in running:
                job.end()
            running = begun
    for job in running:
        job.end()


if __name__ == "__main__":
    looks = subprocess.Popen(["sh", "-c", LOOKS, "looks", *HOOKS])
    try:
        main(sys.argv[1:4], sys.argv[4:])
    finally:
        looks.kill()
        looks.wait()
