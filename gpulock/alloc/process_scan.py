# SPDX-License-Identifier: Apache-2.0
"""One look at the processes of a node, and whom it may have missed.

Hot, loaded when a lock must be judged. A release asks for its job's owner alone: another user who
hides, forks or multiplies processes costs it nothing. What a look at everybody cannot read in time
it has missed of that process's user: it keeps no lock of another.
"""

import os
import time

from gpulock.alloc.process_reader import NOT_READ, SYSTEM_UIDS, ProcessReader
from gpulock.node.procfs import OVER, UNREAD, Proc, ProcessStatus
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from gpulock.alloc.environs import StartedAs

    # a scheduler's own way to tell that a process is of one of its jobs
    ClaimMembership = Callable[[int, Owner, "ProcessScan"], bool]

SCAN_SECONDS = 10.0  # for a whole look: 3,000 processes take 0.03
ROUNDS = 16  # re-listings of /proc before a scan that never comes to rest is given up
SAMPLES, ENOUGH = 64, 16  # of new processes, to tell who forks all the time
SAMPLING = 0.2  # seconds
MANY = 1024  # numbers given since the last sample that are asked for


class ProcessScan(ProcessReader):
    """One look at all processes, taken when first needed and shared by all judgements.

    To ask for a process takes no look. `members` has what a scheduler knows of the processes of its
    jobs, by name.
    /proc is listed twice at least, and again until nothing of a listing vanished before it was
    read: one that forks and ends all the time cannot hide between two reads, nor by a pid that
    wrapped behind the place the listing has reached. A pid that is given again is read again.
    `blind` says why the look is not to be trusted, and is empty where it is; `never_settled` that
    it is for nothing but processes that came and went; `partial` that there was no time for all.
    What was missed of one user `why_blind_about` that user says.
    """

    def __init__(self, proc: Proc, members: "Mapping[str, ClaimMembership] | None" = None) -> None:
        super().__init__(proc)
        self.members = members or {}
        self.blind = ""
        self.partial = self.never_settled = self.complete = False
        self._users: "dict[int, str] | None" = None
        self._running: set[int] = set()  # users who had a process
        self._others: set[int] = set()  # uids whose processes are left out
        self._unread: dict[int, str] = {}  # by user: why not all environments are known
        self._newest: "list[tuple[set[int], frozenset[int]]] | None" = None
        self._read: dict[int, int] = {}  # the inode of /proc/PID as that process was read
        self._listings, self._spent_listing = 0, 0.0

    def restrict(self, users: dict[int, str]) -> None:
        """Leave out processes of ordinary users but these (uid -> name); called before the look.

        Where they have none, nobody is looked at.
        """
        self._users = users

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return the status of every process that is not over, by pid."""
        while not self.complete:
            self.list_new()
        return self.seen

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
        late = begun + SCAN_SECONDS - self._spent_listing
        for pid, inode in self._list_unread(first).items():
            if time.monotonic() > late:
                self.partial = self.complete = True
                self.blind = f"no time for process {pid}: the others took {SCAN_SECONDS:.0f} s"
                break
            try:
                status = self._read_status(pid)
                if status.state not in OVER or not self.proc.finished(pid):
                    self.seen[pid] = status
                    new.append(pid)
            except ProcessLookupError:
                vanished = True
                continue
            except TimeoutError:
                pass  # of a user who has had enough
            except (PermissionError, ValueError) as fault:
                self.blind = f"process {pid} cannot be seen: {fault}"
                new.append(pid)
            self._read[pid] = inode
        self._spent_listing += time.monotonic() - begun
        if not vanished and not first:
            self.complete = True
        elif self._listings == ROUNDS and not self.complete:
            self.complete = True
            if not self.blind:
                self.never_settled = True
                self.blind = "processes came and went faster than they could be read"
        return new

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
        unread = {pid: inode for pid, inode in listed.items() if read.get(pid) != inode}
        return unread if self._users is None else self._leave_out_others(unread, self._users)

    def _leave_out_others(self, unread: dict[int, int], users: "Collection[int]") -> dict[int, int]:
        """Return the processes of the users who are asked for, root, and the system.

        By the owner of /proc/PID, which is the effective uid, also where the files in it are root's
        (a process that is not dumpable): a sixth of what a status costs. One that vanished
        meanwhile may be anybody's: it is looked at more closely.
        """
        root, others, kept = self.proc.root, self._others, dict[int, int]()
        for pid, inode in unread.items():
            try:
                uid = os.stat(f"{root}/{pid}").st_uid
                if uid not in others and self._is_of_others(pid, uid, users):
                    others.add(uid)
            except OSError:
                uid = -1
            if uid in others:
                self._read[pid] = inode
            else:
                kept[pid] = inode
        return kept

    def _is_of_others(self, pid: int, uid: int, users: "Collection[int]") -> bool:
        """Return whether an ordinary user who is not asked for has a process; raise OSError."""
        ours = uid < SYSTEM_UIDS or uid in users or uid == os.geteuid()
        return not ours and self.account(pid, uid) not in users

    def is_process_of(self, pid: int, uid: int) -> bool:
        """Return whether a process is a user's: by a uid of its own, or as its subordinate uid.

        Raises OSError or ValueError where it cannot be seen.
        """
        if pid not in self.seen:
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
        signed = uid - (1 << 32) if uid >> 31 else uid  # the call takes an int, the kernel a uid_t
        try:  # the kernel answers at one moment: no process can fork away from it
            os.getpriority(os.PRIO_USER, signed)
        except ProcessLookupError:
            from gpulock.node.subordinate import may_have_subordinate_uids

            return may_have_subordinate_uids(uid, (self._users or {}).get(uid, ""))
        self._running.add(uid)
        return True

    def why_blind_about(self, uid: "int | None", gid: int = 0) -> str:
        """Return why processes of a user, of anybody, or of a group may have been missed."""
        if uid is None:
            return self.blind or next(iter(self._missed.values()), "")
        missed = self._missed.get(uid, "")
        return (
            missed if self.never_settled and not self.may_fork(uid, gid) else self.blind or missed
        )

    def may_fork(self, uid: int, gid: int = 0) -> bool:
        """Return whether it may be a user, or a group, that forks faster than can be read.

        Who does so hides itself alone: whose the newest processes are is looked at, once.
        """
        if not gid and not self.may_run(uid):
            return False
        if self._newest is None:
            self._newest = self._look_at_newest()
        for uids, groups in self._newest:
            if uid in uids or gid in groups:
                return True
        return len(self._newest) < ENOUGH

    def _look_at_newest(self) -> "list[tuple[set[int], frozenset[int]]]":
        """Return uids and groups of processes that just started, as many as are met in a while.

        Most numbers are of none: a fork may fail.
        """
        newest: "list[tuple[set[int], frozenset[int]]]" = []
        late = time.monotonic() + SAMPLING
        try:
            before = self.proc.last_pid()
            while time.monotonic() < late and len(newest) < SAMPLES:
                last = self.proc.last_pid()
                for pid in range(last, max(before, last - MANY), -1):
                    try:
                        newest.append(self._uids_and_groups(pid))
                    except ProcessLookupError:
                        continue
                before = last
        except (OSError, ValueError, IndexError):
            pass
        return newest

    def _uids_and_groups(self, pid: int) -> "tuple[set[int], frozenset[int]]":
        try:
            status = self._read_status(pid)
        except TimeoutError:
            return {self._user_of(pid)}, UNREAD
        uid = status.uids[0]
        account = self.account(pid, uid) if uid >= SYSTEM_UIDS else uid
        return {*status.uids, account}, status.groups

    def started_as(self, uid: int) -> "tuple[dict[int, StartedAs], str]":
        """Return what each process of a user was started as, and why there may be more."""
        statuses = self.seen if self.scan_closed else self.statuses()
        own = [pid for pid, one in statuses.items() if one.uids[0] == uid and not one.kernel]
        if self.complete and not own:
            return {}, ""
        if uid not in self._unread and not self.scan_closed:
            from gpulock.alloc.environs import read_each

            hides = uid == os.geteuid() != 0
            self._unread[uid] = read_each(own, lambda pid: self.read_start(pid, uid), hides)
        started = {pid: self._started[pid] for pid in own if pid in self._started}
        return started, self._unread.get(uid, f"uid {uid} {NOT_READ}")

    def carriers(self, gid: int) -> list[int]:
        """Return the processes that carry a supplementary group."""
        return [pid for pid, status in self.statuses().items() if gid in status.groups]

    def session_members(self, sid: int) -> list[int]:
        """Return the processes of one session."""
        return [pid for pid, status in self.statuses().items() if status.session == sid]

    def named(self, name: str) -> list[int]:
        """Return the processes of one name, or of one with Debian's ending (slurmd-wlm)."""
        return [p for p, one in self.statuses().items() if one.name.partition("-")[0] == name]
