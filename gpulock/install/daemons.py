# SPDX-License-Identifier: Apache-2.0
"""Which processes are a scheduler's daemon, and which programs beside one root may run.

Any user can give a process any name, program, directory and environment. A process is believed only
where root started it (or, for an ordinary user, that user), and a program beside it is run only
where no other user could have put it there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.install.files import InstallError
from gpulock.node.procfs import Proc

_NAMESPACES = ("uts", "mnt")  # a daemon in a container is another machine's


@dataclass(frozen=True)
class SchedulerDaemon:
    """A daemon as it was started: `uid` is its effective one, `folder` where it works."""

    pid: int
    ppid: int
    uid: int
    program: Path
    folder: Path
    words: tuple[str, ...]
    env: dict[str, str]

    @property
    def owners(self) -> frozenset[int]:
        """Whose programs may stand beside it: root's, our own, its admin user's.

        An execd's real uid is root's and its effective uid the admin user's (sge_conf(5)), who owns
        the whole of Grid Engine in most installations: root runs them each time execd starts.
        """
        return trusted_program_owners() | {self.uid}


def trusted_program_owners() -> frozenset[int]:
    """Return whose programs we run in any case."""
    return frozenset((0, os.geteuid()))


def check_trusted(path: Path, owners: Collection[int], setting: str) -> None:
    """Raise InstallError for a program that others than these owners could have put there."""
    if why := why_untrusted_program(path, owners):
        raise InstallError(f"{path} is not run: {why}; fix it, or set {setting}")


def find_scheduler_daemons(name: str, proc: Path = Path("/proc")) -> list[SchedulerDaemon]:
    """Return every daemon of a name that runs on this machine, as far as it can be seen.

    None of a stranger's, none of another container's, and no child that a daemon has just forked.
    """
    daemons = [
        one
        for pid in Proc(str(proc)).pids()
        if (one := _read_daemon_process(name, proc, pid)) is not None
    ]
    pids = {daemon.pid for daemon in daemons}
    return [daemon for daemon in daemons if daemon.ppid not in pids]


def _read_daemon_process(name: str, proc: Path, pid: int) -> SchedulerDaemon | None:
    """Return one process as a daemon, None where it is none, is gone, or cannot be seen.

    Its uid first: what a process of a user's says of itself is not even read, it may hang. Not by
    psutil, which takes the uids from the name of a process that is called `Uid:<tab>0<tab>0<tab>0`.
    """
    processes, entry = Proc(str(proc)), proc / str(pid)
    try:
        start, status = processes.start(pid), processes.status(pid)
        if status.name.partition("-")[0] != name or status.uids[0] not in trusted_program_owners():
            return None
        own = proc / "self/ns"
        if any(os.readlink(entry / "ns" / one) != os.readlink(own / one) for one in _NAMESPACES):
            return None
        if not _started_by_its_owner(name, entry):
            return None
        words, env = [
            processes.read(pid, file).decode("utf-8", "surrogateescape").split("\0")
            for file in ("cmdline", "environ")
        ]
        program = Path(processes.link(pid, "exe").removesuffix(" (deleted)"))  # upgraded
        folder = Path(processes.link(pid, "cwd"))
        if processes.start(pid) != start:
            return None  # the number is another process's by now
    except (OSError, ValueError):
        return None
    variables = dict(word.split("=", 1) for word in env if "=" in word)
    return SchedulerDaemon(
        pid, status.ppid, status.uids[1], program, folder, tuple(words), variables
    )


def _started_by_its_owner(name: str, entry: Path) -> bool:
    """Return whether a process runs a program of the name, and no setuid one.

    A user's link named sge_execd to sudo runs as root, with the user's environment and directory.
    """
    program = os.readlink(entry / "exe").removesuffix(" (deleted)")
    mode = (entry / "exe").stat().st_mode
    # Debian's slurmd is slurmd-wlm
    return Path(program).name.startswith(name) and not mode & (stat.S_ISUID | stat.S_ISGID)
