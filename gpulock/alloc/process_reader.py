# SPDX-License-Identifier: Apache-2.0
"""Processes that are asked for one by one, whose each is, and the time that a user's may take.

Hot, loaded when a lock must be judged. Any user may have processes that are slow to read. All that
is read of them, statuses and environments, has one limit for each user: who has had that time has
hidden their own processes, and nobody else's.
"""

import os
import time

from gpulock.node.procfs import INIT, UNREAD, Proc, ProcessStatus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from gpulock.alloc.environs import StartedAs
    from gpulock.node.subordinate import SubordinateUids

HOST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's proc_ns.h
SYSTEM_UIDS = 1000  # below: system users (login.defs(5) UID_MIN)
ONE_USER = 1.0  # seconds for one user's processes: a status of 65,536 groups takes 0.04
NOT_READ = "was not looked at before the gate"


class ProcessReader:
    """Processes by their numbers, each read once."""

    def __init__(self, proc: Proc) -> None:
        self.proc = proc
        self.scan_closed = (
            False  # the gate is held: neither environments nor open files are read now
        )
        self.seen: dict[int, ProcessStatus] = {}  # who is not over, as far as a look has come
        self._asked: dict[int, ProcessStatus] = {}  # of those that are in no listing
        self._started: "dict[int, StartedAs]" = {}
        self._accounts: dict[int, int] = {}
        self._subordinate: "SubordinateUids | None" = None
        self._spent: dict[int, float] = {}  # seconds, by user
        self._late: set[int] = set()  # users who have had ONE_USER
        self._missed: dict[int, str] = {}  # by user: why not all is known
        self._sees_all: "bool | None" = None

    def status(self, pid: int) -> ProcessStatus:
        """Return a process's status; raise as `_read_status` does."""
        status = self.seen.get(pid) or self._asked.get(pid)
        if status is None:
            status = self._asked[pid] = self._read_status(pid)
        return status

    def _read_status(self, pid: int) -> ProcessStatus:
        """Read a process's status, in the time that is left for its user's.

        Raises OSError or ValueError as Proc.status does, TimeoutError where no time is left.
        """
        if self._late and (user := self._user_of(pid)) in self._late:
            raise TimeoutError(self._missed.setdefault(user, too_much_of(user)))
        begun = time.monotonic()
        status = self.proc.status(pid)
        user = self._user_of(pid, status.uids[1])
        if user:
            self._charge(user, begun)
        if status.groups is UNREAD:
            for one in (user, status.uids[0]):  # also of a set-user-id program
                self._missed.setdefault(one, f"process {pid} has too many groups to be read")
        return status

    def _charge(self, user: int, begun: float) -> None:
        """Charge a user with the time since `begun`; the system's (0) are read whatever it is."""
        self._spent[user] = self._spent.get(user, 0.0) + time.monotonic() - begun
        if user and self._spent[user] > ONE_USER:
            self._late.add(user)

    def _user_of(self, pid: int, uid: "int | None" = None) -> int:
        """Return the user who answers for a process, 0 for the system's; raise OSError.

        By its effective uid, which the owner of /proc/PID is. Where namespaces may not be seen,
        or the kernel does not tell who made one (before Linux 4.11), each uid answers for itself.
        """
        if uid is None:
            try:
                uid = os.stat(f"{self.proc.root}/{pid}").st_uid
            except FileNotFoundError as gone:
                raise ProcessLookupError(*gone.args) from gone
        try:
            return self.account(pid, uid) if uid >= SYSTEM_UIDS else 0
        except ProcessLookupError:
            raise
        except OSError:
            return uid

    def account(self, pid: int, uid: int) -> int:
        """Return whose a process of an ordinary uid is: of a subordinate uid, its user's.

        That is who made the user namespace it runs in, or in whose range its uid is. A uid is asked
        about once: it is either an account of its own or in one user's range. Raises OSError.
        """
        owner = self._accounts.get(uid)
        if owner is None:
            try:
                owner = self.proc.namespace_owner(pid)
            except PermissionError:
                if os.geteuid() == 0:
                    raise
                owner = -1
            if self._subordinate is None:
                from gpulock.node.subordinate import SubordinateUids

                self._subordinate = SubordinateUids()
            owner = self._subordinate.owner(uid if owner <= 0 else owner)
            self._accounts[uid] = owner
        return owner

    def read_start(self, pid: int, uid: int) -> "StartedAs":
        """Return what a process of a user was started as; raise OSError where that is not seen.

        A read waits for whoever changes the memory of that process: its time is the clock's.
        """
        if pid not in self._started:
            from gpulock.alloc.environs import StartedAs, read_environ

            left = ONE_USER - self._spent.get(uid, 0.0)
            if self.scan_closed or left <= 0:
                raise TimeoutError(
                    f"process {pid} {NOT_READ}" if self.scan_closed else too_much_of(uid)
                )
            begun = time.monotonic()
            try:
                environ = read_environ(self.proc, pid, begun + left)
            except TimeoutError:
                if left > ONE_USER / 2:
                    raise  # it hangs
                raise TimeoutError(too_much_of(uid)) from None
            finally:
                self._charge(uid, begun)
            self._started[pid] = StartedAs(environ)
        return self._started[pid]

    def ancestry(self, pid: int) -> dict[int, ProcessStatus]:
        """Return a process and what is above it, as far as that can be seen."""
        above: dict[int, ProcessStatus] = {}
        while pid > 0 and pid not in above:
            try:
                above[pid] = self.status(pid)
            except (OSError, ValueError):
                break
            pid = above[pid].ppid
        return above

    def descends(self, pid: int, ancestors: "Collection[int]") -> bool:
        """Return whether one of `ancestors` is `pid` or above it."""
        return bool(ancestors) and any([one in ancestors for one in self.ancestry(pid)])

    def has_ended(self, pid: int) -> bool:
        """Return whether a process is seen to have ended, whatever it was when it was read."""
        try:
            return self.proc.finished(pid)
        except (OSError, ValueError):
            return False

    def sees_all(self) -> bool:
        """Return whether a process that is not shown is gone: no hidepid, and the host's pids."""
        if self._sees_all is None:
            try:
                self.proc.status(INIT)
                self._sees_all = HOST_PIDS in self.proc.namespaces()
            except (OSError, ValueError):
                self._sees_all = False
        return self._sees_all


def too_much_of(uid: int) -> str:
    """Return why not all of a user could be looked at, whatever process it stopped at."""
    return f"uid {uid} has more processes and open files than can be looked at in time"


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
