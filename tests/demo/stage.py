# SPDX-License-Identifier: Apache-2.0
"""Jobs on a simulated node under the real hooks, each waiting until it is told to end."""

from __future__ import annotations

import os
import select
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gpulock.install.hooks import HookPaths, render_hooks
from gpulock.simulate.node import SimulatedNode, write_simulated_node
from gpulock.store import boot
from tests.demo.shepherd import Shepherd, ShepherdResult
from tests.support.execd import SimulatedJob, spool_job
from tests.support.packed_job import ResourceRequest

END_SECONDS = 20.0  # a job or hook that takes longer is stuck
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
        self._bell = bell
        hooks = ([str(hook)] for hook in (stage.hooks.prolog, stage.hooks.epilog))
        self.shepherd = Shepherd(spool_job(stage.node.directory, job), *hooks)
        self.result: ShepherdResult | None = None

    @property
    def name(self) -> str:
        """Return the job as people write it: `101`, `102.1`."""
        return f"{self.job.job_id}.{self.job.task_id}" if self.job.task_id else str(self.job.job_id)

    def start(self) -> None:
        """Run the prolog; return when the job runs, or when it was refused."""
        self.shepherd.start()
        try:
            self.shepherd.job_pid(END_SECONDS)
        except TimeoutError:
            self.result = self.shepherd.wait(END_SECONDS)

    def variables(self) -> dict[str, str]:
        """Return the variables that the prolog wrote for the job."""
        text = (self.shepherd.spooled.folder / "environment").read_text()
        pairs = (line.partition("=") for line in text.splitlines())
        return {name: value for name, _, value in pairs}

    def visible_devices(self) -> str:
        """Return the job's CUDA_VISIBLE_DEVICES."""
        return self.variables()["CUDA_VISIBLE_DEVICES"]

    def output(self) -> str:
        """Return what job and hooks printed."""
        return self.shepherd.spooled.output.read_text()

    def end_job_process(self) -> None:
        """Let the job's process come to its end."""
        fd = os.open(self._bell, os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(fd, b"\n")
            self._wait_job_end()
        finally:
            os.close(fd)

    def finish(self) -> ShepherdResult:
        """End the job and wait for its epilog."""
        if self.result is None:
            self.end_job_process()
            self.result = self.shepherd.wait(END_SECONDS)
        return self.result

    def kill_shepherd(self) -> None:
        """Kill the shepherd alone: no epilog will run."""
        self.shepherd.kill()
        self.result = self.shepherd.wait()

    def close(self) -> None:
        """End whatever is left of it."""
        try:
            self.shepherd.kill_job(0.0)
            self.shepherd.kill()
        except RuntimeError:
            return  # it was never started

    def _wait_job_end(self) -> None:
        """Wait until the job's process is over."""
        pidfd = -1
        try:
            pidfd = os.pidfd_open(self.shepherd.job_pid())
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(END_SECONDS * 1000):
                raise TimeoutError(f"job {self.name} does not end")
        except ProcessLookupError:
            return
        finally:
            if pidfd >= 0:
                os.close(pidfd)


class DemoNode:
    """A simulated node with rendered hooks below `directory`; close it to end every job."""

    def __init__(self, directory: Path, preset: str = "dgx1") -> None:
        self.node: SimulatedNode = write_simulated_node(directory / "node", preset)
        self.hooks: HookPaths = render_hooks(directory / "hooks", self.node.config)
        self._plays: list[DemoJob] = []

    def submit(
        self, job_id: int, gpus: str = "", task: int = 0, name: str = "job", asked: str = "gpu"
    ) -> DemoJob:
        """Start a job that asks for `-l gpu=<gpus>`, or another complex, or for none."""
        bell = self.node.directory / f"bell.{job_id}.{task}"
        os.mkfifo(bell)
        script = ("/bin/sh", "-c", SCRIPT, name, str(self.node.dev_root), str(bell))
        wanted = (ResourceRequest(asked, float(gpus), gpus),) if gpus else ()
        play = DemoJob(
            self, SimulatedJob(job_id, script, task_id=task, name=name, resources=wanted), bell
        )
        self._plays.append(play)
        play.start()
        return play

    def allow_shares(self) -> None:
        """Let four jobs share the last GPU from now on."""
        with self.node.config.open("a") as file:
            file.write("SHARES=7:4\nSGE_COMPLEXES=gpu gpu_share=share\n")

    def close(self) -> None:
        """End every job and shepherd."""
        for play in self._plays:
            play.close()


@contextmanager
def open_demo_node() -> Generator[DemoNode]:
    """Give a stage in a folder of its own, and leave nothing of it behind."""
    folder = tempfile.mkdtemp(prefix="gpulock-demo-", dir=find_demo_folder())
    try:
        found = DemoNode(Path(folder))
        try:
            yield found
        finally:
            found.close()
    finally:
        # again where a hook that is being ended still writes into it
        late = time.monotonic() + END_SECONDS
        while os.path.lexists(folder) and time.monotonic() < late:
            shutil.rmtree(folder, ignore_errors=True)


def find_demo_folder() -> str:
    """Return a folder for temporary files where locks may lie and hooks may be executed."""
    for folder in (tempfile.gettempdir(), "/dev/shm", "/var/tmp"):
        try:
            usable = (
                os.access(folder, os.W_OK)
                and boot.file_system_type(folder) in boot.LOCAL_FILE_SYSTEMS
            )
            if usable and not os.statvfs(folder).f_flag & os.ST_NOEXEC:
                return folder
        except OSError:
            continue
    return tempfile.gettempdir()
