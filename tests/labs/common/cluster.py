# SPDX-License-Identifier: Apache-2.0
"""What the machines of both labs have in common: commands on them, daemons, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.labs.sge.machines import Machine, User, processes
from tests.support.wait import LabError, wait_ended


class Machines:
    """Machines below one folder, the first is the master, and ordinary users, by their uids.

    `env` is that of each command.
    """

    env: Mapping[str, str]

    def __init__(self, lab: str, names: Sequence[str], users: Mapping[str, int]) -> None:
        self.lab, self.master = Path(lab), names[0]
        self.machines = {name: Machine(name, i, self.lab) for i, name in enumerate(names, 1)}
        self.users = {
            name: User(name, uid, self.lab / "home" / name) for name, uid in users.items()
        }

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

    # --- for the text of a failure ------------------------------------------------------------

    @property
    def name(self) -> str:
        """Return the lab's name."""
        return self.lab.name

    def asked(self, *commands: str) -> dict[str, str]:
        """Return what client programs print as root on the head machine, errors included."""
        done = {line: self.run_in(self.master, line.split(), seconds=20) for line in commands}
        return {line: one.stdout + one.stderr for line, one in done.items()}

    def lock_owners(self) -> str:
        """Return every lock of every machine with its owner's file."""
        places = (self.path_in(name, "/run/gpulock/locks") for name in self.machines)
        owners = [file for place in sorted(places) for file in sorted(place.glob("*/owner"))]
        return "\n".join(f"{file}:\n{_text_of(file)}" for file in owners)

    def last_outputs(self) -> str:
        """Return the end of what the last jobs printed into their users' homes."""
        files = [file for who in self.users.values() for file in who.home.glob("*[.]o*[0-9]")]
        files += [file for who in self.users.values() for file in who.home.glob("out.*")]
        last = sorted(
            (file for file in files if file.is_file()), key=lambda one: one.stat().st_mtime
        )
        return "\n".join(f"{file}:\n{_text_of(file)[-1000:]}" for file in last[-4:])

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

    def end_daemon(self, pid: int, name: str, kill: bool) -> None:
        """End a daemon, by SIGKILL if asked, and wait until it is gone."""
        if not pid:
            raise LabError(f"{name} is not running")
        os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
        wait_ended([pid], why=f"{name} ({pid}) to end")


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError as fault:  # a job, or a hook, is at work
        return f"({fault.strerror})"
