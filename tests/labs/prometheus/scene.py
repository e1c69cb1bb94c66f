# SPDX-License-Identifier: Apache-2.0
"""A simulated node with its exporter and the Prometheus that scrapes it, and jobs to play on it."""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gpulock.node.devices import Device
from gpulock.store import atomic
from gpulock.store.locks import LockStore
from tests.demo.stage import DemoJob, DemoNode
from tests.labs.prometheus.lab import (
    ENVIRONMENT,
    Prometheus,
    exporter,
    free_address,
    gpulock,
    shipped,
    shortened,
)
from tests.support.execd import SimulatedJob
from tests.support.packed_job import ResourceRequest
from tests.support.wait import wait_until


@dataclass
class Scene:
    """A simulated node, its exporter and the Prometheus that scrapes it."""

    stage: DemoNode
    address: str
    server: Prometheus
    plays: list[DemoJob] = field(default_factory=list[DemoJob])
    started: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def run(self, *options: str) -> subprocess.Popen[bytes]:
        """Run a job that holds GPUs until it is ended, by `gpulock run`."""
        words = gpulock(self.stage.config, "run", *options, "--", "sleep", "600")
        self.started.append(subprocess.Popen(words, env=ENVIRONMENT))
        return self.started[-1]

    def devices(self) -> list[Device]:
        """Return the devices of the node."""
        return self.stage.node().devices()

    def end(self, job: subprocess.Popen[bytes]) -> None:
        """End a job of `gpulock run`, and free what it held as gpulockd does."""
        job.terminate()
        job.wait()
        self.free()

    def free(self) -> None:
        """Wait until no device is held, looked after as gpulockd does."""

        def freed() -> bool:
            self.reap()
            return not locks.read_all_locks()

        locks = LockStore(str(self.stage.simulated.lock_dir))
        wait_until(freed, why=lambda: f"all devices to be free\n{locks.read_all_locks()!s}")

    def reap(self) -> None:
        """Look after the owners of all locks, once, as gpulockd does."""
        self.command("reap")

    def command(self, *words: str) -> str:
        """Run gpulock on the node; return what it printed."""
        line = gpulock(self.stage.config, *words)
        said = subprocess.run(
            line, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
        )
        return said.stdout or said.stderr

    def submit(self, job_id: int, user: str, task: int = 0) -> DemoJob:
        """Start a job of another user under the real hooks of Grid Engine, with one GPU.

        `task` is that of an array, 0 for none.
        """
        who = pwd.getpwnam(user)
        bell = self.stage.root / f"bell.{job_id}"
        os.mkfifo(bell)
        bell.chmod(0o666)
        command = ("/bin/sh", "-c", 'read -r _ < "$1"', "job", str(bell))
        one = (ResourceRequest("gpu", 1.0, "1"),)
        job = SimulatedJob(
            job_id,
            command,
            owner=user,
            uid=who.pw_uid,
            gid=who.pw_gid,
            task_id=task,
            resources=one,
        )
        play = DemoJob(self.stage, job, bell)
        self.plays.append(play)
        play.start()
        return play

    def clear(self) -> None:
        """End every job, and let nothing be otherwise than the driver shows it."""
        self.end_all()
        self.script("")
        self.free()

    def end_all(self) -> None:
        """End every job."""
        for play in self.plays:
            play.close()
        for process in self.started:
            process.kill()
            process.wait()

    def script(self, text: str) -> None:
        """Say what the simulated driver shows otherwise."""
        atomic.replace_file(str(self.stage.root / "telemetry"), text.encode())

    def metrics(self) -> str:
        """Return what the exporter says."""
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return text


@contextmanager
def scene(preset: str, settings: str = "") -> Generator[Scene]:
    """Give a scene in a folder that other users can look into, and leave nothing of it."""
    with tempfile.TemporaryDirectory(prefix="gpulock-lab-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        stage = DemoNode(folder, preset)
        stage.config.write_text(stage.config.read_text() + settings)
        address = free_address()
        found: Scene | None = None
        running = exporter(stage.config, stage.simulated.exporter_dir, address)
        try:
            rules = shortened(shipped())
            with Prometheus(folder, {"gpulock": [address]}, rules) as server:
                found = Scene(stage, address, server)
                yield found
        finally:
            running.end()
            if found:
                found.end_all()
            stage.close()
