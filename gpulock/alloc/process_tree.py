# SPDX-License-Identifier: Apache-2.0
"""The processes above a process, and whether it is a daemon of root's.

Hot, loaded by every release.
"""

import os

from gpulock.node.procfs import Proc, ProcessStatus
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Protocol

    class ClaimMembership(Protocol):
        """A scheduler's own way to tell that a process is of one of its jobs."""

        def __call__(self, pid: int, record: Owner, tree: "ProcessTree") -> bool: ...


INIT = 1
HOST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's proc_ns.h
SYSTEM_UIDS = 1000  # below: system users (login.defs(5) UID_MIN)


class ProcessTree:
    """The processes that are asked for, with what is above them; each is read once.

    `members` has what a scheduler knows of the processes of its jobs, by the scheduler's name.
    """

    def __init__(self, proc: Proc, members: "Mapping[str, ClaimMembership] | None" = None) -> None:
        self.proc = proc
        self.members = members or {}
        self._known: dict[int, ProcessStatus] = {}
        self._sees_all: "bool | None" = None

    def status(self, pid: int) -> ProcessStatus:
        """Return a process's status; raise OSError or ValueError as Proc.status does."""
        found = self._known.get(pid)
        if found is None:
            found = self._known[pid] = self.proc.status(pid)
        return found

    def ancestry(self, pid: int) -> dict[int, ProcessStatus]:
        """Return a process and what is above it, as far as that can be seen."""
        found: dict[int, ProcessStatus] = {}
        while pid > 0 and pid not in found:
            try:
                found[pid] = self.status(pid)
            except (OSError, ValueError):
                break
            pid = found[pid].ppid
        return found

    def descends(self, pid: int, ancestors: "Collection[int]") -> bool:
        """Return whether one of `ancestors` is `pid` or above it."""
        return bool(ancestors) and any([one in ancestors for one in self.ancestry(pid)])

    def sees_all(self) -> bool:
        """Return whether a process that is not shown is gone: no hidepid, and the host's pids."""
        if self._sees_all is None:
            try:
                self.proc.status(INIT)
                self._sees_all = HOST_PIDS in self.proc.pid_namespace()
            except (OSError, ValueError):
                self._sees_all = False
        return self._sees_all


def is_root_program(proc: Proc, pid: int, name: str) -> bool:
    """Return whether a process that root started runs the program `name`, or Debian's `name-wlm`.

    Any process may have any name, and a set-user-id program (sudo, at) has root's uids under the
    name of a link. Who may not see programs may not see more: what a judge needs of it fails later,
    and an ordinary user decides nothing.
    """
    try:
        program = os.path.basename(proc.link(pid, "exe")).removesuffix(" (deleted)")
    except PermissionError:
        return True
    except OSError:
        return False
    return program.partition("-")[0] == name
