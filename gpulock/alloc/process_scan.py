# SPDX-License-Identifier: Apache-2.0
"""One look at the processes of a node, and whom it may have missed.

Hot, loaded when a lock must be judged. A release asks for its job's owner alone: another user who
hides, forks or multiplies processes costs it nothing, and keeps no lock that is not that user's.
"""

import os
import time

from gpulock.alloc.process_tree import SYSTEM_UIDS, ProcessTree
from gpulock.node.procfs import OVER, Proc, ProcessStatus
from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from gpulock.alloc.environs import StartedAs
    from gpulock.alloc.process_tree import ClaimMembership

LONGEST = 10.0  # seconds for a whole look: 3,000 processes take 0.03
ROUNDS = 16  # re-listings of /proc before a scan that never comes to rest is given up
SAMPLES, ENOUGH = 64, 16  # of new processes, to tell who forks all the time
SAMPLING = 0.2  # seconds
MANY = 1024  # numbers given since the last sample that are asked for
SUBUID, NSSWITCH = "/etc/subuid", "/etc/nsswitch.conf"


class ProcessScan(ProcessTree):
    """One look at all processes, taken when first needed and shared by all judgements.

    /proc is listed twice at least, and again until nothing of a listing vanished before it was
    read: one that forks and ends all the time cannot hide between two reads, nor by a pid that
    wrapped behind the place the listing has reached. A pid that is given again is read again.
    `blind` says why the look is not to be trusted, and is empty where it is.
    """

    def __init__(self, proc: Proc, members: "Mapping[str, ClaimMembership] | None" = None) -> None:
        super().__init__(proc, members)
        self.blind = ""
        self.partial = False
        self._users: "dict[int, str] | None" = None
        self._accounts: dict[int, int] = {}
        self._left_out: dict[int, bool] = {}  # by the owner of /proc/PID
        self._running: set[int] = set()  # users who had a process
        # by uid, what its processes were started as, and why there may be more
        self._environs: "dict[int, tuple[dict[int, StartedAs], str]]" = {}
        self.restless = False
        self._newest: "list[ProcessStatus] | None" = None
        self._statuses: dict[int, ProcessStatus] = {}
        self._read: dict[int, int] = {}  # the inode of /proc/PID as that process was read
        self.complete = False
        self._listings, self._spent = 0, 0.0

    def restrict(self, users: dict[int, str]) -> None:
        """Leave out processes of ordinary users but these (uid -> name); called before the look.

        Where they have none, nobody is looked at.
        """
        self._users = users

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return the status of every process that is not over, by pid."""
        while not self.complete:
            self.list_new()
        return self._statuses

    def list_new(self) -> list[int]:
        """List /proc once more and read who is new; return those, but for what is over.

        Their files are read before the next listing, which then serves both: two are enough where
        nothing vanishes. With the last one the look is `complete`.
        """
        first, new, vanished = self._listings == 0, list[int](), False
        if self._users is not None and not any([self.may_run(uid) for uid in self._users]):
            self.complete = True
            return new
        self._listings += 1
        begun = time.monotonic()
        late = begun + LONGEST - self._spent
        unread = self._list_unread(first)
        for pid in self._leave_out_others(unread):
            if time.monotonic() > late:
                self.partial = self.complete = True
                self.blind = f"no time for process {pid}: the others took {LONGEST:.0f} s"
                break
            try:
                status = self.proc.status(pid)
                if status.state not in OVER or not self.proc.finished(pid):
                    self._statuses[pid] = status
                    new.append(pid)
            except ProcessLookupError:
                vanished = True
                continue
            except (PermissionError, ValueError) as fault:
                self.blind = f"process {pid} cannot be seen: {fault}"
                new.append(pid)
            self._read[pid] = unread[pid]
        self._spent += time.monotonic() - begun
        if not vanished and not first:
            self.complete = True
        elif self._listings == ROUNDS and not self.complete:
            self.complete = True
            if not self.blind:
                self.restless = True
                self.blind = "processes came and went faster than they could be read"
        return new

    def mark_blind(self, why: str) -> None:
        """Say that nothing of this look is to be trusted, of no user."""
        self.blind, self.restless = why, False

    def _list_unread(self, first: bool) -> dict[int, int]:
        """Return the processes that are there and were not read yet, with their inodes.

        The kernel's own threads are asked for after a listing: a number of theirs that came to a
        process of a job before would hide it.
        """
        listed = self.proc.inodes()
        if first:
            kernel = self.proc.kernel_threads()
            self._read = {pid: listed[pid] for pid in kernel if pid in listed}
        read = self._read
        return {pid: inode for pid, inode in listed.items() if read.get(pid) != inode}

    def _leave_out_others(self, unread: dict[int, int]) -> list[int]:
        """Return the processes of the users who are asked for, of root and of system users.

        By the owner of /proc/PID, which is the effective uid, also where the files in it are root's
        (a process that is not dumpable): a sixth of what a status costs. One that vanished
        meanwhile may be anybody's, and is among them.
        """
        users, left_out, kept = self._users, self._left_out, list[int]()
        if users is None:
            return list(unread)
        folder = os.open(self.proc.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for pid, inode in unread.items():
                try:
                    uid = os.stat(f"{pid}", dir_fd=folder).st_uid
                    if uid not in left_out:
                        left_out[uid] = self._is_of_others(pid, uid, users)
                    other = left_out[uid]
                except OSError:
                    other = False  # it is looked at more closely
                if other:
                    self._read[pid] = inode
                else:
                    kept.append(pid)
        finally:
            os.close(folder)
        return kept

    def _is_of_others(self, pid: int, uid: int, users: "Collection[int]") -> bool:
        """Return whether an ordinary user who is not asked for has a process; raise OSError."""
        ours = uid < SYSTEM_UIDS or uid in users or uid == os.geteuid()
        return not ours and self.account(pid, uid) not in users

    def account(self, pid: int, uid: int) -> int:
        """Return whose a process of an ordinary uid is: of a subordinate uid, its user's.

        That is who made the user namespace it runs in. A uid is asked about once: it is either
        an account of its own or in one user's range of subordinate uids. Raises OSError.
        """
        found = self._accounts.get(uid)
        if found is None:
            try:
                found = self.proc.namespace_owner(pid)
            except PermissionError:
                if os.geteuid() == 0:
                    raise
                found = -1
            found = self._accounts[uid] = uid if found <= 0 else found
        return found

    def is_process_of(self, pid: int, uid: int) -> bool:
        """Return whether a process is a user's: by a uid of its own, or as its subordinate uid.

        Raises OSError or ValueError where it cannot be seen.
        """
        if pid not in self._statuses:
            owner = os.stat(f"{self.proc.root}/{pid}").st_uid
            if self._is_of_others(pid, owner, (uid,)):
                return False
        uids = self.status(pid).uids[:3]
        return uid in uids or (uids[0] >= SYSTEM_UIDS and self.account(pid, uids[0]) == uid)

    def may_run(self, uid: int) -> bool:
        """Return whether a user may have a process here at all: one call where there is none.

        A user who had one is not asked about again: the kernel goes through all processes for it.
        """
        if self.proc.root != "/proc" or uid in self._running:
            return True
        try:  # the kernel answers at one moment: no process can fork away from it
            os.getpriority(os.PRIO_USER, uid)
        except ProcessLookupError:
            return may_have_subordinate_uids(uid, (self._users or {}).get(uid, ""))
        self._running.add(uid)
        return True

    def why_blind_about(self, uid: int, gid: int = 0) -> str:
        """Return why processes of a user, or of a group, may have been missed, or nothing."""
        if self.restless and not self.may_fork(uid, gid):
            return ""
        return self.blind

    def may_fork(self, uid: int, gid: int = 0) -> bool:
        """Return whether it may be a user, or a group, that forks faster than can be read.

        Who does so hides itself alone: whose the newest processes are is looked at, once.
        """
        if not gid and not self.may_run(uid):
            return False
        if self._newest is None:
            self._newest = self._look_at_newest()
        for status in self._newest:
            if uid in (*status.uids, self._accounts.get(status.uids[0])) or gid in status.groups:
                return True
        return len(self._newest) < ENOUGH

    def _look_at_newest(self) -> list[ProcessStatus]:
        """Return the status of processes that have just started, as many as are met in a while."""
        found: list[ProcessStatus] = []
        late = time.monotonic() + SAMPLING
        try:
            before = self.proc.last_pid()
            while time.monotonic() < late and len(found) < SAMPLES:
                last = self.proc.last_pid()
                for pid in range(last, max(before, last - MANY), -1):
                    self._add_sample(pid, found)
                before = last
        except (OSError, ValueError, IndexError):
            pass
        return found

    def _add_sample(self, pid: int, found: "list[ProcessStatus]") -> None:
        """Add a process that has just started; most numbers are of none: a fork may fail."""
        try:
            status = self.proc.status(pid)
            if status.uids[0] >= SYSTEM_UIDS:
                self.account(pid, status.uids[0])
        except ProcessLookupError:
            return
        found.append(status)

    def status(self, pid: int) -> ProcessStatus:
        """Return one process's status, read afresh where it appeared since."""
        if not self._listings:
            self.statuses()
        return self._statuses.get(pid) or super().status(pid)

    def started_as(self, uid: int) -> "tuple[dict[int, StartedAs], str]":
        """Return what each process of a user was started as, and why there may be more.

        Each environment is read once. What cannot be seen at all makes the look blind.
        """
        if uid not in self._environs:
            from gpulock.alloc.environs import read_environs

            started, missed, unseen = read_environs(uid, self.statuses(), self.proc)
            self._environs[uid] = started, missed
            if unseen:
                self.mark_blind(unseen)
        return self._environs[uid]

    def carriers(self, gid: int) -> list[int]:
        """Return the processes that carry a supplementary group."""
        return [pid for pid, status in self.statuses().items() if gid in status.groups]

    def session_members(self, sid: int) -> list[int]:
        """Return the processes of one session."""
        return [pid for pid, status in self.statuses().items() if status.session == sid]

    def named(self, name: str) -> list[int]:
        """Return the processes of one name, or of one with Debian's ending (slurmd-wlm)."""
        return [p for p, one in self.statuses().items() if one.name.partition("-")[0] == name]


def may_have_subordinate_uids(
    uid: int, user: str, subuid: str = SUBUID, nsswitch: str = NSSWITCH
) -> bool:
    """Return whether a user may have subordinate uids (subuid(5)); without a name, anybody."""
    try:
        lines = atomic.read_text(subuid, 1 << 22).split("\n")
    except FileNotFoundError:
        lines = []
    except OSError:
        return True
    own = (f"{user}:", f"{uid}:") if user else ("",)
    if any([line.startswith(own) for line in lines if line]):
        return True
    try:
        return "\nsubid:" in f"\n{atomic.read_text(nsswitch)}"
    except FileNotFoundError:
        return False
    except OSError:
        return True
