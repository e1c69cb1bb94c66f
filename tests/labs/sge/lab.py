# SPDX-License-Identifier: Apache-2.0
"""A real Grid Engine on one machine: a qmaster and three execution hosts in namespaces.

Needs a private root. All of it lives in one scratch folder and in namespaces, gone after `down`.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NewType

from tests.labs.common.processes import children_of, end
from tests.labs.sge import config
from tests.labs.sge.cluster import NODES, Cluster
from tests.labs.sge.install import PROGRAMS
from tests.support.wait import LabError, wait_until

JobId = NewType("JobId", int)


class GridEngine(Cluster):
    """The lab as its tests use it; each method raises `LabError` when it could not do its work."""

    # --- configuration ------------------------------------------------------------------------

    def qconf(self, *args: str) -> str:
        """Run qconf as root on the master; return what it printed."""
        return self.client("qconf", *args).stdout

    def set_conf(self, key: str, value: str, *, host: str = "global") -> None:
        """Set one line of the global or of a host's configuration."""
        shown = self.qconf("-sconf", host)
        self.load("-Mconf", host, config.edited(shown, {key: value}))

    def forget_conf(self, host: str, *keys: str) -> None:
        """Take lines out of a host's own configuration; its execd reads that when it reports."""
        left = without(self.qconf("-sconf", host), keys).strip()
        assert left, f"the whole configuration of {host} would go, its group ids with it"
        self.load("-Mconf", host, f"{left}\n")

    def set_hooks(self, prolog: str, epilog: str, *, queues: Iterable[str] = config.QUEUES) -> None:
        """Set prolog and epilog of the queues; `NONE` takes one away."""
        for queue in queues:
            self.qconf("-rattr", "queue", "prolog", prolog, queue)
            self.qconf("-rattr", "queue", "epilog", epilog, queue)

    def set_complex(self, line: str) -> None:
        """Add or replace a complex: `name shortcut TYPE RELOP REQ CONSUMABLE DEFAULT URGENCY`."""
        name, rest = line.split(maxsplit=1)
        self.load("-Mc", "complexes", config.edited(self.qconf("-sc"), {name: rest}))

    def set_exechost(self, node: str, complex_values: str) -> None:
        """Set the consumables of a node."""
        self.qconf("-rattr", "exechost", "complex_values", complex_values, node)

    # --- jobs ---------------------------------------------------------------------------------

    def submit(
        self,
        user: str,
        *qsub_args: str,
        env: Mapping[str, str] | None = None,
        node: str | None = None,
        stdin: str | None = None,
    ) -> JobId:
        """Submit with qsub as a user, from the master or from `node`, in the user's home.

        A script on `stdin` is run as it is; words after `-b y` go through a shell on the node.
        """
        command = [str(PROGRAMS / "qsub"), "-terse", *qsub_args]
        done = self.run_as(user, command, machine=node, env=env, stdin=stdin)
        first = done.stdout.split(".")[0].strip()
        if done.returncode != 0 or not first.isdigit():
            raise LabError(f"{user}: {command} failed: {done.stdout}{done.stderr}")
        return JobId(int(first))

    def qrsh(self, user: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run qrsh as a user without a terminal of its own; `-pty no` where hooks are set."""
        return self.run_as(user, [str(PROGRAMS / "qrsh"), *args])

    def qstat(self, *args: str) -> str:
        """Run qstat as root on the master; return what it printed."""
        return self.client("qstat", *args).stdout

    def qdel(self, *args: str) -> str:
        """Run qdel as root on the master; return what it printed."""
        return self.client("qdel", *args, check=False).stdout

    def qmod(self, *args: str) -> str:
        """Run qmod as root on the master; return what it printed."""
        return self.client("qmod", *args).stdout

    def state(self, job: JobId, task: int | None = None) -> str:
        """Return qstat's state of a job (of one task), `r` or `Eqw`; empty once it is gone."""
        for line in self.qstat("-u", "*", "-g", "d").splitlines():
            fields = line.split()
            if fields[:1] == [str(job)] and (task is None or fields[-1] == str(task)):
                return fields[4]
        return ""

    def wait_state(self, job: JobId, *states: str) -> str:
        """Wait until a job is in one of the states; return it."""
        (state,) = wait_until(  # the state of a job that is gone is empty
            lambda: (now,) if (now := self.state(job)) in states else None,
            why=f"job {job} to become {' or '.join(one or 'gone' for one in states)}",
        )
        return state

    def wait_running(self, job: JobId) -> None:
        """Wait until a job runs, which is past its prolog: its own process has its group."""
        self.wait_state(job, "r")
        wait_until(lambda: any(map(started, self._spools(job))), why=f"job {job} to have a process")

    def runs(self, job: JobId, task: int) -> bool:
        """Return whether a task of an array runs, past its prolog."""
        return self.state(job, task) == "r" and any(map(started, self._spools(job, task)))

    def wait_done(self, job: JobId) -> None:
        """Wait until qmaster has forgotten a job: its epilog is over and its slot is free."""
        self.wait_state(job, "")

    def wait_settled(self, job: JobId) -> None:
        """Wait until qmaster, execd and accounting have all ended with a job that has run."""
        self.wait_done(job)
        self.records(job)
        wait_until(lambda: not self._spools(job), why=f"execd to remove the spool of job {job}")

    def visits(self, job: JobId) -> list[dict[str, str]]:
        """Return each accounting record of a job as it is now: one each time it was at a node."""
        done = self.client("qacct", "-j", str(job), check=False)
        blocks = [block.splitlines() for block in done.stdout.split("=" * 62)[1:]]
        pairs = [[line.split(None, 1) for line in lines] for lines in blocks]
        return [{one[0]: one[1].strip() for one in rows if len(one) == 2} for rows in pairs]

    def records(self, job: JobId) -> list[dict[str, str]]:
        """Return the accounting records of a job, once there is any.

        qmaster may write it a moment after qstat has told that the job is gone.
        """
        return wait_until(lambda: self.visits(job), why=f"job {job} in accounting")

    def spool_dir(self, job: JobId) -> Path:
        """Return a job's active spool folder, on whichever node it is."""
        found = self._spools(job, 1)
        if len(found) != 1:
            raise LabError(f"job {job} has {len(found)} spool folders: {found}")
        return found[0]

    def shepherd_pid(self, job: JobId) -> int:
        """Return the pid of a job's shepherd."""
        return int((self.spool_dir(job) / "pid").read_text())

    def queue_states(self) -> dict[str, str]:
        """Return gpu.q's state on each node: empty is good, `E` in error, `au` not heard of."""
        states: dict[str, str] = {}
        for line in self.qstat("-f", "-q", "gpu.q").splitlines():
            fields = line.split()
            if fields and fields[0].startswith("gpu.q@"):
                states[fields[0].partition("@")[2]] = fields[5] if len(fields) > 5 else ""
        return states

    def wait_queue(self, node: str, state: str) -> None:
        """Wait until gpu.q's state on a node has the letters asked for; empty is no state."""
        wait_until(
            lambda: (now := self.queue_states()[node]) == state or (bool(state) and state in now),
            why=f"gpu.q@{node} to be {state or 'open'}",
        )

    def clear_queue_errors(self) -> None:
        """Take all queues out of error and open them again."""
        self.qmod("-c", "*")
        self.qmod("-e", "*")

    def recover(self) -> None:
        """Repair what a test has left: daemons run, no job is there, every queue is open."""
        if not self.qmaster_pid():
            self.start_qmaster()
        for node in NODES:
            if not self.execd_pid(node):
                self.start_execd(node)
        self.clear_jobs()
        self.clear_queue_errors()

    def clear_jobs(self) -> None:
        """Delete all jobs and wait until they are gone.

        One whose hook waits for ever is ended with its shepherd, so that the next test is not kept
        waiting by it; the error is raised all the same.
        """
        self.qdel("-u", "*")
        try:
            self._wait_jobless()
        except LabError:
            for place in (self.lab / "spool").glob("*/active_jobs/*/pid"):
                with contextlib.suppress(OSError, ValueError):
                    shepherd = int(place.read_text())
                    end([*children_of(shepherd), shepherd])
            self.qdel("-f", "-u", "*")
            self._wait_jobless()
            raise

    # --- inner --------------------------------------------------------------------------------

    def _wait_jobless(self) -> None:
        wait_until(lambda: not self.qstat("-u", "*").strip(), why="all jobs to be deleted")

    def _spools(self, job: JobId, task: int | None = None) -> list[Path]:
        name = f"{job}.{'*' if task is None else task}"
        return sorted((self.lab / "spool").glob(f"*/active_jobs/{name}"))


def without(text: str, names: Sequence[str]) -> str:
    """Return what qconf showed of an object without some of its lines, for qconf to read back."""
    lines = text.replace("\\\n", " ").splitlines()
    kept = [line for line in lines if line and line[0] != "#" and line.split()[0] not in names]
    return "\n".join(kept) + "\n"


def started(spool: Path) -> bool:
    """Return whether the shepherd's child has become the job's: it forks first, and names it.

    One that is over by now has been the job's too.
    """
    try:
        pid = int((spool / "job_pid").read_text())
        group = (spool / "addgrpid").read_text().strip()
    except (FileNotFoundError, ValueError):
        return False
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return group in status.partition("\nGroups:")[2].partition("\n")[0].split()
