# SPDX-License-Identifier: Apache-2.0
"""A node of the Grid Engine lab with ISOLATION=cgroup, and device nodes that have no driver."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.labs.common.device_nodes import PROBE, Service, make_nodes, programs
from tests.labs.sge import jobs
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import on
from tests.labs.sge.lab import JobId

NODE = NODES[0]


class Site:
    """A node that confines its jobs, with device nodes that have no driver."""

    def __init__(self, gpus: Gpulock, service: Service, dev: Path) -> None:
        self.gpus = gpus
        self.service = service
        self.dev = dev
        self.programs = programs()
        self.probe = f"/usr/bin/python3 -IS {jobs.script(gpus, 'probe.py', PROBE)} {dev}"

    def configure(self, **changes: str) -> None:
        """Write the node's settings."""
        keys = {"SYS_ROOT": "/sys", "DEV_ROOT": str(self.dev), **changes}
        self.gpus.configure(NODE, ISOLATION="cgroup", **keys)

    def submit(self, *asked: str, script: str) -> JobId:
        """Submit a job of glalice to the node."""
        return self.gpus.sge.submit("glalice", *on(NODE, *asked), stdin=script)

    def own(self, job: JobId) -> set[str]:
        """Return the names of the nodes of a job's devices."""
        return {
            f"nvidia{record.minor}"
            for record in self.gpus.locks(NODE).values()
            if record.job_id == str(job)
        }

    def left(self) -> list[str]:
        """Return what isolation has left behind; programs go with their cgroups."""
        if jobs := self.service.jobs():
            return jobs
        return [f"program {number}" for number in programs() - self.programs]


@contextmanager
def isolated(gpus: Gpulock) -> Generator[Site]:
    """Have a node confine its jobs for a while."""
    dev = gpus.sge.lab / "dev"
    make_nodes(dev, GPUS)
    try:
        service = Service("gpulock-lab-execd.service", gpus.sge.execd_pid(NODE))
        try:
            made = Site(gpus, service, dev)
            made.configure()
            yield made
            gpus.sge.clear_jobs()
        finally:
            service.close()
    finally:
        shutil.rmtree(dev)
