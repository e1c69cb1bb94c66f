# SPDX-License-Identifier: Apache-2.0
"""The face of hook_parent.py: a living process that starts hooks again and again.

Cheaper than gpulock.simulate's Shepherd, which plays a job's whole life in a process each time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from typing_extensions import Self

from tests.support.execd import SpooledJob

PROGRAM = Path(__file__).with_name("hook_parent.py")
SHEPHERD = "sge_shepherd"


class Run(NamedTuple):
    """How a child ended: 128 + signal when it was killed; wall time, processor time."""

    status: int
    nanoseconds: int
    cpu_nanoseconds: int


class Starter:
    """A process called `name` in `folder`, whose command line shows `title`; a context manager.

    Where `uid` is given it is that user's. With `own` it runs a program of that name, a copy of the
    interpreter in `folder`: where nothing is simulated a daemon is known by its program.
    """

    def __init__(
        self, folder: Path, name: str, title: str = "", uid: int = -1, own: bool = False
    ) -> None:
        who = [str(uid)] if uid >= 0 else []
        program = sys.executable
        if own:
            program = shutil.copy(os.path.realpath(sys.executable), str(folder / name))
        self._process = subprocess.Popen(
            [program, "-IS", str(PROGRAM), name, title, *who],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = int(self._line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process; its pid is over when this returns."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(10)

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        proc: str = "",
        stderr: str = "/dev/null",
        program: str = "",
        uid: int = -1,
    ) -> Run:
        """Run one program as a hook is run, to its end."""
        order: dict[str, object] = {"argv": list(argv), "env": dict(env), "stderr": stderr}
        order |= {"proc": proc, "program": program}
        if uid >= 0:
            order["uid"] = uid
        if self._process.stdin is None:
            raise RuntimeError("the parent of hooks has no standard input")
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Run(*map(int, self._line().split()))

    def _line(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line.endswith("\n"):
            raise RuntimeError(f"the parent of hooks ended with {self._process.wait(10)}")
        return line


class Shepherd(Starter):
    """A process named sge_shepherd in the spool folder of `job`."""

    def __init__(self, job: SpooledJob) -> None:
        self.job = job
        super().__init__(job.folder, SHEPHERD)

    def environment(self) -> dict[str, str]:
        """Return what the configured `env -i` leaves of a hook's environment."""
        job = self.job.job
        return {
            "PATH": "/usr/bin:/bin",
            "JOB_ID": str(job.job_id),
            "SGE_TASK_ID": str(job.task_id),
            "QUEUE": job.queue,
        }
