# SPDX-License-Identifier: Apache-2.0
"""What the machines of both labs have in common: commands on them, daemons, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.labs.sge.machines import Machine, User, mark, processes
from tests.labs.sge.wait import LabError, until


class Machines:
    """Machines below one folder, `master` among them, and ordinary users; `env` is a command's."""

    lab: Path
    master: str
    machines: dict[str, Machine]
    users: dict[str, User]
    env: dict[str, str]

    def run_in(
        self,
        machine: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        seconds: float = 60.0,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root on a machine, with the scheduler's own variables and `env`."""
        whole = {**self.env, **(env or {})}
        return self.machines[machine].run(command, env=whole, seconds=seconds, stdin=stdin)

    def run_as(
        self,
        user: str,
        command: Sequence[str],
        *,
        machine: str | None = None,
        env: Mapping[str, str] | None = None,
        seconds: float = 60.0,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as an ordinary user in the user's home, on the master unless told."""
        who = self.users[user]
        return self.machines[machine or self.master].run(
            command,
            env={**self.login(user), **(env or {})},
            uid=who.uid,
            cwd=str(who.home),
            seconds=seconds,
            stdin=stdin,
        )

    def login(self, user: str) -> dict[str, str]:
        """Return the environment of a user's login."""
        home = str(self.users[user].home)
        return {**self.env, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash"}

    def path_in(self, node: str, inside: str) -> Path:
        """Where this process finds a path of a machine, such as its /run/gpulock."""
        return self.machines[node].path(inside)

    def still_here(self) -> list[str]:
        """Say which processes and mounts of the lab are on the host; none after `down`."""
        left = [f"process {pid} ({name})" for pid, name in processes(self.lab).items()]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return left + [f"mount {m}" for m in mounts if mark(self.lab) in m or f" {self.lab}" in m]

    def make_homes(self) -> None:
        """Make the users' homes."""
        for user in self.users.values():
            user.home.mkdir(parents=True)
            os.chown(user.home, user.uid, user.uid)

    def daemon_pid(self, pid_file: Path, name: str) -> int:
        """Return the running daemon that a file of this lab names, 0 where there is none."""
        try:
            pid = int(pid_file.read_text())
        except (OSError, ValueError):
            return 0
        found = processes(self.lab, [pid]).get(pid, "")
        return pid if found.partition("-")[0] == name else 0  # begun anew it is slurmctld-wlm

    def end_daemon(self, pid: int, name: str, kill: bool, why: Callable[[], str] = str) -> None:
        """End a daemon, by SIGKILL if asked, and wait until it is gone."""
        if not pid:
            raise LabError(f"{name} is not running")
        os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
        until(
            lambda: not processes(self.lab, [pid]),
            what=f"{name} ({pid}) to end",
            interval=0.01,
            why=why,
        )
