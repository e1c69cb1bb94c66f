# SPDX-License-Identifier: Apache-2.0
"""Run a spooled job under a simulated sge_shepherd.

Not simulated: what qmaster makes of the exit statuses, the job's rlimits, signals queued during a
hook, the kill by additional group. The shepherd's session stands for that group: job and
descendants are in it, the hooks are not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Union

from tests.support.execd import SpooledJob

POLL_SECONDS = 0.005
PROGRAM = Path(__file__).with_name("shepherd_process.py")

Status = Union[int, Literal["missing"], None]


@dataclass(frozen=True)
class ShepherdResult:
    """How a job ended: the exit statuses of its children, None for one that did not run.

    A child ended by a signal counts as 128 + signal, "missing" could not be started.
    """

    prolog: Status
    job: Status
    epilog: Status


class Shepherd:
    """A process that looks like an sge_shepherd and runs prolog, job and epilog of one job.

    The hooks are argument lists, empty for none. They get JOB_ID, SGE_TASK_ID (0 where it is no
    array job), QUEUE and PATH, and nothing else.
    """

    def __init__(
        self, spooled: SpooledJob, prolog: Sequence[str] = (), epilog: Sequence[str] = ()
    ) -> None:
        self.spooled = spooled
        self.prolog = list(prolog)
        self.epilog = list(epilog)
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Return the shepherd's process id."""
        return self._started().pid

    def start(self) -> None:
        """Start the shepherd and return once it looks like one; the prolog is then under way."""
        process = subprocess.Popen(
            [sys.executable, "-IS", str(PROGRAM)],
            cwd=self.spooled.folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process = process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a pipe that was asked for is missing")
        with process.stdin as orders, process.stdout as answer:
            json.dump(self._orders(), orders)
            orders.close()
            if answer.readline() != "ready\n":
                raise RuntimeError(f"the simulated shepherd ended with {process.wait()}")

    def wait(self, timeout_seconds: float | None = None) -> ShepherdResult:
        """Wait for the shepherd's end; raise subprocess.TimeoutExpired when it takes longer."""
        self._started().wait(timeout_seconds)
        return self._result()

    def kill(self) -> None:
        """Kill the shepherd alone, as the OOM killer may; the job's processes live on."""
        self._started().kill()
        self._started().wait()

    def kill_job(self, timeout_seconds: float = 10.0) -> None:
        """Kill the job's process group, as qdel does; nothing to do where there is none.

        A process id that went to somebody else since is not in the shepherd's session.
        """
        try:
            pid = self.job_pid(timeout_seconds)
            if os.getsid(pid) == self.pid:
                os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, TimeoutError):
            return

    def job_pid(self, timeout_seconds: float = 10.0) -> int:
        """Return the job's process id, waiting for its start; raise TimeoutError without one."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            text = _read_spool_file(self.spooled.folder / "job_pid")
            if text.endswith("\n"):
                return int(text)
            if self._started().poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"job {self.spooled.job.key} was not started")
            time.sleep(POLL_SECONDS)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the simulated shepherd was not started")
        return self._process

    def _orders(self) -> dict[str, object]:
        job = self.spooled.job
        return {
            "prolog": self.prolog,
            "epilog": self.epilog,
            "command": job.command,
            "cwd": job.cwd,
            "output": str(self.spooled.output),
            "uid": job.uid,
            "gid": job.gid,
            "add_grp_id": job.add_grp_id,
            "hook_environment": {
                "JOB_ID": str(job.job_id),
                "SGE_TASK_ID": str(job.task_id),
                "QUEUE": job.queue,
            },
        }

    def _result(self) -> ShepherdResult:
        found: dict[str, Status] = {}
        for line in _read_spool_file(self.spooled.folder / "simulated_results").splitlines():
            name, _, status = line.partition("=")
            found[name] = "missing" if status == "missing" else int(status)
        return ShepherdResult(found.get("prolog"), found.get("job"), found.get("epilog"))


def _read_spool_file(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
