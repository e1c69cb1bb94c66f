# SPDX-License-Identifier: Apache-2.0
"""A node of a real scheduler on which gpulock runs, as the scenarios of both schedulers need it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

from tests.labs.common.confined_node import ConfinedNode
from tests.labs.common.installed import Installed, gate_file, reap, waiting_for
from tests.labs.common.processes import command_of, end
from tests.labs.common.reaped import Reaped
from tests.support.wait import wait_until

SLEEP: Final = "exec sleep 600\n"
# a daemon of its own, and itself: two that sleep
DAEMONISES: Final = "(setsid sh -c 'setsid sleep 600 >/dev/null 2>&1 & exit' &)\nexec sleep 600\n"
SHOW: Final = "echo mask=${CUDA_VISIBLE_DEVICES-unset}.\n"


class Site(ABC):
    """One node with its scheduler; jobs are Alice's and Bob's, each of so many GPUs of the node."""

    gpus: Installed
    node: str
    count: int  # GPUs of the node
    alice: str
    bob: str
    is_selected_by_slurm: bool = False  # which devices a job gets

    runs: ClassVar[str]  # why the locks are held of a job that runs
    left: ClassVar[str]  # of one whose supervisors were killed
    released: ClassVar[str]  # of one that is over for its scheduler, and has such processes
    settled: ClassVar[str]  # why its locks are freed once these are gone
    leaked: ClassVar[str]  # why those of a job are freed whose epilog never ran
    names_itself: ClassVar[str] = ""  # lines of a job by which the journal knows it

    def prepare(self) -> None:  # noqa: B027 (most need nothing)
        """Let its scheduler be as most tests want it."""

    # --- jobs -----------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, gpus: int, script: str, *, user: str = "", tasks: int = 0) -> int:
        """Submit a bash script as a job of the node, Alice's unless told, or as an array."""

    @abstractmethod
    def wait_running(self, job: int) -> None:
        """Wait until a job's own process runs, and its node's daemon knows of it."""

    def wait_launched(self, job: int) -> None:  # noqa: B027 (most need nothing)
        """Wait until the hook that starts a job is over, as far as its scheduler sees it."""

    @abstractmethod
    def wait_over(self, job: int) -> None:
        """Wait until scheduler, hooks and accounting are done with a job."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Return whether no job is left."""

    @abstractmethod
    def cancel(self, job: int) -> None:
        """Have the scheduler end a job."""

    @abstractmethod
    def tasks(self, job: int) -> list[int]:
        """Return the tasks of an array that run, past their prolog."""

    @abstractmethod
    def held_by_task(self, job: int, task: int) -> list[str]:
        """Return the lock ids of the devices of an array's task."""

    @abstractmethod
    def said(self, job: int) -> str:
        """Return what a job and its hooks have told its user."""

    @abstractmethod
    def processes(self, job: int) -> list[int]:
        """Return the living processes of a job that holds GPUs."""

    @abstractmethod
    def kill_supervisors(self, job: int) -> None:
        """Kill a job's shepherd, or its step daemons, as an OOM killer would."""

    @abstractmethod
    def conclude(self, job: int) -> None:
        """Have the scheduler be done with a job without supervisors, whose processes live on."""

    @abstractmethod
    def leak(self, job: int) -> None:
        """End a job without an epilog."""

    # --- refusals -------------------------------------------------------------------------------

    @abstractmethod
    def wait_sent_back(self, job: int) -> str:
        """Wait until a job is back in the queue; return what its user was told."""

    @abstractmethod
    def begin(self, job: int) -> None:
        """Let a job that was sent back start now."""

    @abstractmethod
    def begin_held(self, job: int) -> None:
        """Let a job that met a broken node start now."""

    @abstractmethod
    def believing(self) -> contextlib.AbstractContextManager[None]:
        """Let the scheduler believe in more GPUs than there are; jobs do not wait for them."""

    @abstractmethod
    def drained(self, refused: int) -> contextlib.AbstractContextManager[None]:
        """Let no job start that was sent back."""

    @abstractmethod
    def wait_stopped(self, job: int) -> str:
        """Wait until a job's node is out of service; return why, as an administrator reads it."""

    @abstractmethod
    def in_service(self) -> bool:
        """Return whether the node is in service."""

    @abstractmethod
    def put_in_service(self) -> None:
        """Put the node in service again."""

    # --- daemons --------------------------------------------------------------------------------

    @abstractmethod
    def stop_daemon(self) -> None:
        """Kill the node's daemon: execd, slurmd."""

    @abstractmethod
    def start_daemon(self) -> None:
        """Start it again."""

    @abstractmethod
    def controller_away(self) -> contextlib.AbstractContextManager[None]:
        """Let there be no qmaster, no slurmctld, for a while."""

    @abstractmethod
    def come_back(self, job: int) -> None:
        """Start the node's daemon after `reboot`, and have the scheduler forget the job."""

    # --- gpulock --------------------------------------------------------------------------------

    @abstractmethod
    def configure(self, **changes: str) -> None:
        """Write the node's settings."""

    @abstractmethod
    def confined(self) -> contextlib.AbstractContextManager[ConfinedNode]:
        """Let the kernel keep each job to its own GPUs."""

    @abstractmethod
    def with_hooks_below(self, prefix: Path, jobs: int) -> contextlib.AbstractContextManager[None]:
        """Let the node's hooks be those of a prefix's current version, for so many jobs at once."""

    def held(self, job: int) -> list[str]:
        """Return the lock ids of a job's devices."""
        return self.gpus.held_by(job)[self.node]

    def locks(self) -> dict[str, int]:
        """Return the number of the job that holds each lock, by lock id; 0 is no job."""
        owners = self.gpus.locks(self.node).items()
        return {name: int(one.job_id) if one.job_id.isdigit() else 0 for name, one in owners}

    def command(self, *words: str) -> str:
        """Run `gpulock` as root on the node; return what it printed."""
        return self.gpus.told(self.node, *words)

    def device_nodes(self, job: int) -> set[str]:
        """Return the names of the device nodes of a job's GPUs."""
        locks = self.gpus.locks(self.node).items()
        return {f"nvidia{one.minor_of(name)}" for name, one in locks if one.job_id == str(job)}

    def waiting(self, name: str) -> tuple[Path, str]:
        """Return a file of Alice's that is not there, and bash lines that wait for it."""
        path = gate_file(self.gpus, name, self.alice)
        return path, waiting_for(path)

    def reap(self, *around: str) -> Reaped:
        """Reconcile on the node; `around` are words before the command."""
        return reap(self.gpus, self.node, *around)

    @property
    def state_dir(self) -> Path:
        """Return the node's STATE_DIR."""
        return self.gpus.cluster.path_in(self.node, "/var/lib/gpulock")

    # --- made of these --------------------------------------------------------------------------

    def start(self, gpus: int, script: str = SLEEP, *, user: str = "") -> int:
        """Start a job; return it once it runs."""
        job = self.submit(gpus, script, user=user)
        self.wait_running(job)
        return job

    def end(self, *jobs: int) -> None:
        """Have the scheduler end jobs, and wait until they are over."""
        for job in jobs:
            self.cancel(job)
        for job in jobs:
            self.wait_over(job)

    def sleepers(self, job: int, count: int = 1) -> list[int]:
        """Wait until a job is just so many processes and all sleep; return them."""

        def asleep() -> list[int] | None:
            pids = self.processes(job)
            sleeps = all(command_of(pid).startswith("sleep ") for pid in pids)
            return pids if sleeps and len(pids) == count else None

        return wait_until(asleep, why=f"{count} of job {job} that sleep")

    def wait_said(self, job: int, text: str) -> str:
        """Wait until a job has told its user something; return all of it."""
        return wait_until(
            lambda: said if text in (said := self.said(job)) else None,
            why=lambda: f"job {job} to say {text!r}\n{self.said(job)}",
        )

    def refused(self, gpus: int) -> str:
        """Ask for GPUs that are not free, as another user; return what that one is told."""
        with self.believing():
            job = self.submit(gpus, "echo ran\n", user=self.bob)
            said = self.wait_sent_back(job)
            assert self.held(job) == [] and "ran\n" not in said
            self.end(job)
        return said

    def wait_empty(self) -> None:
        """Wait until no job is left."""
        wait_until(self.is_empty, why="all jobs to be over")

    def reboot(self, job: int) -> None:
        """Let the node go down with a job on it; its daemon is not started again."""
        self.stop_daemon()
        self.kill(job)

    def kill(self, job: int) -> None:
        """End a job with all its processes, and no epilog; the scheduler may not know."""
        self.kill_supervisors(job)
        while pids := self.processes(job):
            end(pids)
