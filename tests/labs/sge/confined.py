# SPDX-License-Identifier: Apache-2.0
"""A node of the Grid Engine lab with ISOLATION=cgroup, and device nodes that have no driver."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.labs.common.confined_node import ConfinedNode
from tests.labs.common.device_nodes import Service, make_nodes
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import on
from tests.labs.sge.lab import JobId

NODE = NODES[0]


class Site(ConfinedNode):
    """An execution host that confines its jobs."""

    def __init__(self, gpus: Gpulock, service: Service, dev: Path) -> None:
        super().__init__(gpus, NODE, dev, service)
        self.gpus = gpus

    def configure(self, **changes: str) -> None:
        keys = {"SYS_ROOT": "/sys", "DEV_ROOT": str(self.dev), **changes}
        self.gpus.configure(NODE, ISOLATION="cgroup", **keys)

    def submit(self, *asked: str, script: str) -> JobId:
        """Submit a job of glalice to the node."""
        return self.gpus.sge.submit("glalice", *on(NODE, *asked), stdin=script)


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
