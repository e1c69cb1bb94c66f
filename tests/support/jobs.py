# SPDX-License-Identifier: Apache-2.0
"""Grid Engine jobs on a Box: spooled as execd does, under a shepherd of the fake /proc."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpulock.node.procfs import Proc
from gpulock.sge import prolog, spool
from gpulock.sge.spool import Spool
from tests.support import execd
from tests.support.execd import SpooledJob
from tests.support.packed_job import PER_SLOT, ResourceRequest
from tests.support.trees import Box

SHEPHERD = 500


def gpus(value: float, name: str = "gpu", consumable: int = PER_SLOT) -> ResourceRequest:
    """Return `-l gpu=value`."""
    return ResourceRequest(name, value, f"{value:g}", consumable)


class Site(Box):
    """A simulated Grid Engine node."""

    def __init__(self, root: Path, count: int = 4, **keys: str) -> None:
        super().__init__(root, count, **keys)
        self.pid = SHEPHERD

    def spool(self, *resources: ResourceRequest, **about: object) -> SpooledJob:
        """Spool a job with these requests."""
        fields: dict[str, object] = {"job_id": 12, "command": ("/bin/true",), **about}
        job = execd.SimulatedJob(resources=resources, **fields)  # type: ignore[arg-type]
        return execd.spool_job(self.root, job)

    def run(self, *resources: ResourceRequest, pid: int = SHEPHERD, **about: object) -> SpooledJob:
        """Spool a job and let its shepherd run; hooks called then are its children."""
        job = self.spool(*resources, **about)
        self.proc.shepherd(pid, job.folder, uid=os.geteuid())
        self.pid = pid
        return job

    def task(self, job: SpooledJob, pid: int, name: str = "1.node", home: bool = False) -> Path:
        """Let a slave task of a job be started; return its directory."""
        folder = job.folder / name
        folder.mkdir()
        for file in ("config", "environment", "pe_hostfile"):
            source = job.folder / file
            kept = source if source.exists() else self.root / "kept" / file
            shutil.copy(kept, folder / file)
        if not home and (job.folder / "config").exists():
            shutil.copytree(job.folder, self.root / "kept", ignore=shutil.ignore_patterns(name))
            (job.folder / "config").unlink()
        self.proc.shepherd(pid, folder)
        return folder

    def above(self, pid: int = SHEPHERD) -> Spool:
        """Return the spool of a shepherd as a hook finds it."""
        return spool.open_shepherd_spool(Proc(str(self.proc.root)), pid, os.geteuid())

    def prolog(self, job: SpooledJob, *words: str, **keys: str) -> int:
        """Run the prolog of a job below the shepherd that runs; return its exit code."""
        argv = ["sge", str(self.pid), *words]
        return prolog.main(argv, self.environ(job), self.config(**keys))

    def environ(self, job: SpooledJob) -> dict[str, str]:
        """Return what `env -i` leaves of a hook's environment."""
        return job.hook_environ()


def child_of(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    """Let this process be started by the shepherd of the job that runs."""
    monkeypatch.setattr(os, "getppid", lambda: site.pid)


def variables(folder: Path) -> dict[str, str]:
    """Return a job's environment file; each name must stand there once."""
    lines = (folder / "environment").read_text().splitlines()
    pairs = [(name, value) for name, _, value in (line.partition("=") for line in lines)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)
