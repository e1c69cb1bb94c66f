# SPDX-License-Identifier: Apache-2.0
"""A node of a lab that confines its jobs, with device nodes that have no driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from tests.labs.common.device_nodes import PROBE, Service, programs
from tests.labs.common.installed import Installed, script


class ConfinedNode(ABC):
    """One node; `probe` is a command that prints what it may open below `dev`."""

    def __init__(self, gpus: Installed, node: str, dev: Path, service: Service) -> None:
        self.node = node
        self.dev = dev
        self.service = service
        self.programs = programs()
        self.probe = f"/usr/bin/python3 -IS {script(gpus, 'probe.py', PROBE)} {dev}"
        self._locks = gpus.locks

    @abstractmethod
    def configure(self, **changes: str) -> None:
        """Write the node's settings."""

    def own(self, job: int) -> set[str]:
        """Return the names of the nodes of a job's devices."""
        locks = self._locks(self.node).items()
        return {f"nvidia{one.minor_of(name)}" for name, one in locks if one.job_id == str(job)}

    def left(self) -> list[str]:
        """Return what isolation has left behind; programs go with their cgroups."""
        if jobs := self.service.jobs():
            return jobs
        own = self.service.launcher_programs()  # as long as the service lives
        return [f"program {number}" for number in programs() - self.programs - own]
