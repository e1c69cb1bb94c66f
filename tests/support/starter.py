# SPDX-License-Identifier: Apache-2.0
"""The face of hook_parent.py: a living process that starts hooks again and again.

The demo plays a job's whole life with it; where hooks are timed or stopped there is no job.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.support.execd import SpooledJob

if TYPE_CHECKING:  # `make demo` brings none of what only tests need
    from typing_extensions import Self

PROGRAM = Path(__file__).with_name("hook_parent.py")
SHEPHERD = "sge_shepherd"


class Run(NamedTuple):
    """How a child ended: 128 + signal when it was killed; wall time, processor time."""

    status: int
    nanoseconds: int
    cpu_nanoseconds: int


class Starter:
    """A process called `name` in `folder`, whose command line shows `title`; a context manager.

    Where `uid` is given it is that user's.
    """

    def __init__(self, folder: Path, name: str, title: str = "", uid: int = -1) -> None:
        who = [str(uid)] if uid >= 0 else []
        self._process = subprocess.Popen(
            [sys.executable, "-IS", str(PROGRAM), name, title, *who],
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
        """Let the process end what it does, and end; its pid is over when this returns."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()  # not before: it may still be to write an answer

    def kill(self) -> None:
        """Kill the process alone, as the OOM killer may; what it started lives on."""
        self._process.kill()
        self.end()

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        proc: str = "",
        stderr: str = "/dev/null",
        program: str = "",
        uid: int = -1,
        append: bool = False,
    ) -> Run:
        """Run one program as a hook is run, to its end."""
        order: dict[str, object] = {"argv": list(argv), "env": dict(env), "stderr": stderr}
        order |= {"proc": proc, "program": program, "append": append}
        return self._obey(order | ({"uid": uid} if uid >= 0 else {}))

    def _obey(self, order: dict[str, object]) -> Run:
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

    def run_hook(self, path: str) -> int:
        """Run a hook whose output is the job's; return its exit status."""
        env, output = self.job.hook_environ(), str(self.job.output)
        return self.run([path], env, stderr=output, append=True).status

    def start_job(self) -> int:
        """Start the job with the environment that the prolog left; return its pid."""
        about = self.job.job
        order: dict[str, object] = {"job": True, "argv": about.command, "append": True}
        order |= {"env": self.job.read_environment(), "stderr": str(self.job.output)}
        return self._obey(order | {"uid": about.uid}).status

    def wait_job(self, pid: int) -> int:
        """Wait for the end of a job; return its exit status."""
        return self._obey({"wait": pid}).status
