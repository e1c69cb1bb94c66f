# SPDX-License-Identifier: Apache-2.0
"""Jobs on a simulated node under the real hooks, each waiting until it is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.execd import SimulatedJob, spool_job
from tests.support.packed_job import ResourceRequest
from tests.support.scene import MEMORY, TEMPORARY, Scene, folder
from tests.support.starter import Shepherd
from tests.support.wait import wait_ended

# Open every device of the grant, as CUDA does, then wait for a line.
SCRIPT = """
fd=3
for n in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do
    eval "exec $fd<\\"$1/nvidia$n\\""; fd=$((fd + 1))
done
read -r _ < "$2"
"""


class DemoJob:
    """One job or array task on the stage."""

    def __init__(self, stage: DemoNode, job: SimulatedJob, bell: Path) -> None:
        self.job = job
        self.spooled = spool_job(stage.root, job)
        self.shepherd = Shepherd(self.spooled)
        self.prolog_status = 0
        self._hooks = stage.hooks
        self._bell = bell

    @property
    def name(self) -> str:
        """Return the job as people write it: `101`, `102.1`."""
        return f"{self.job.job_id}.{self.job.task_id}" if self.job.task_id else str(self.job.job_id)

    def start(self) -> None:
        """Run the prolog; then the job runs, or it was refused and its epilog ran too."""
        self.prolog_status = self.shepherd.run_hook(str(self._hooks.prolog))
        if self.prolog_status == 0:
            self.shepherd.start_job()
        else:
            self._run_epilog()

    @property
    def pid(self) -> int:
        """Return the job's process; raise FileNotFoundError where it was never started."""
        return int((self.spooled.folder / "job_pid").read_text())

    def variables(self) -> dict[str, str]:
        """Return the variables that the prolog wrote for the job."""
        return self.spooled.read_environment()

    def output(self) -> str:
        """Return what job and hooks printed."""
        return self.spooled.output.read_text()

    def end_job_process(self) -> None:
        """Let the job's process come to its end."""
        fd = os.open(self._bell, os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(fd, b"\n")
            wait_ended([self.pid], why=f"job {self.name} to end")
        finally:
            os.close(fd)

    def finish(self) -> None:
        """End the job and run its epilog."""
        self.end_job_process()
        self.shepherd.wait_job(self.pid)
        self._run_epilog()

    def close(self) -> None:
        """End whatever is left of it, a hook that runs first."""
        try:
            self.shepherd.end()
        except subprocess.TimeoutExpired:
            self.shepherd.kill()
        try:
            if os.getsid(self.pid) == self.shepherd.pid:
                os.killpg(self.pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            return

    def _run_epilog(self) -> None:
        self.shepherd.run_hook(str(self._hooks.epilog))
        self.shepherd.end()


class DemoNode(Scene):
    """A simulated node with rendered hooks below `directory`; close it to end every job."""

    def __init__(self, directory: Path, preset: str = "dgx1") -> None:
        super().__init__(directory, preset=preset)
        self._plays: list[DemoJob] = []

    def submit(
        self, job_id: int, gpus: str = "", task: int = 0, name: str = "job", asked: str = "gpu"
    ) -> DemoJob:
        """Start a job that asks for `-l gpu=<gpus>`, or another complex, or for none."""
        bell = self.root / f"bell.{job_id}.{task}"
        os.mkfifo(bell)
        script = ("/bin/sh", "-c", SCRIPT, name, str(self.simulated.dev_root), str(bell))
        wanted = (ResourceRequest(asked, float(gpus), gpus),) if gpus else ()
        play = DemoJob(
            self, SimulatedJob(job_id, script, task_id=task, name=name, resources=wanted), bell
        )
        self._plays.append(play)
        play.start()
        return play

    def allow_shares(self) -> None:
        """Let four jobs share the last GPU from now on."""
        with self.config.open("a") as file:
            file.write("SHARES=7:4\nSGE_COMPLEXES=gpu gpu_share=share\n")

    def close(self) -> None:
        """End every job and shepherd."""
        for play in self._plays:
            play.close()


@contextmanager
def open_demo_node() -> Generator[DemoNode]:
    """Give a stage in a folder of its own, and leave nothing of it behind."""
    with folder("demo", TEMPORARY, MEMORY) as root:
        made = DemoNode(root)
        try:
            yield made
        finally:
            made.close()
