# SPDX-License-Identifier: Apache-2.0
"""One look at the processes of a node, and whom it may have missed.

Hot, loaded when a lock must be judged. A release asks for its job's owner alone: another user who
hides, forks or multiplies processes costs it nothing. What a look at everybody cannot read in time
it has missed of that process's user: it keeps no lock of another.
"""

import os
import time

from gpulock.node.procfs import INIT, OVER, UNREAD, Proc, ProcessStatus
from gpulock.store import atomic
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from gpulock.alloc.environs import StartedAs, UserEnvirons

    # a scheduler's own way to tell that a process is of one of its jobs
    ClaimMembership = Callable[[int, Owner, "ProcessScan"], bool]


HOST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's proc_ns.h
SYSTEM_UIDS = 1000  # below: system users (login.defs(5) UID_MIN)
LONGEST = 10.0  # seconds for a whole look: 3,000 processes take 0.03
UNCHARGED = 0.3  # seconds of reading until it is asked whose each process is
ONE_USER = 1.0  # and then for the processes of one user: one of 65,536 groups takes 0.04
ROUNDS = 16  # re-listings of /proc before a scan that never comes to rest is given up
SAMPLES, ENOUGH = 64, 16  # of new processes, to tell who forks all the time
SAMPLING = 0.2  # seconds
MANY = 1024  # numbers given since the last sample that are asked for
NOT_READ = "was not looked at before the gate"
SUBUID, NSSWITCH = "/etc/subuid", "/etc/nsswitch.conf"


class ProcessScan:
    """One look at all processes, taken when first needed and shared by all judgements.

    Also the processes that are asked for one by one, with what is above them, each read once: that
    takes no look. `members` has what a scheduler knows of the processes of its jobs, by name.
    /proc is listed twice at least, and again until nothing of a listing vanished before it was
    read: one that forks and ends all the time cannot hide between two reads, nor by a pid that
    wrapped behind the place the listing has reached. A pid that is given again is read again.
    `blind` says why the look is not to be trusted, and is empty where it is; `restless` that it is
    for nothing but processes that came and went; `partial` that there was no time for all. What was
    missed of one user `why_blind_about` that user says.
    """

    def __init__(self, proc: Proc, members: "Mapping[str, ClaimMembership] | None" = None) -> None:
        self.proc = proc
        self.members = members or {}
        self.blind = ""
        self.partial = self.restless = self.complete = False
        self.sealed = False  # the gate is held: neither environments nor open files are read now
        self._users: "dict[int, str] | None" = None
        self._accounts: dict[int, int] = {}
        self._running: set[int] = set()  # users who had a process
        self._environs: "dict[int, UserEnvirons]" = {}  # by uid
        self._newest: "list[tuple[set[int], frozenset[int]]] | None" = None
        self.seen: dict[int, ProcessStatus] = {}  # who is not over, as far as the look has come
        self._asked: dict[int, ProcessStatus] = {}  # of those that are in no listing
        self._read: dict[int, int] = {}  # the inode of /proc/PID as that process was read
        self._listings, self._spent = 0, 0.0
        self._reading = 0.0  # seconds in statuses, and of these for each user
        self._charged: dict[int, float] = {}
        self._missed: dict[int, str] = {}  # by user: why not all is known
        self._sees_all: "bool | None" = None

    def status(self, pid: int) -> ProcessStatus:
        """Return a process's status; raise as `_read_status` does."""
        found = self.seen.get(pid) or self._asked.get(pid)
        if found is None:
            found = self._asked[pid] = self._read_status(pid)
        return found

    def _read_status(self, pid: int) -> ProcessStatus:
        """Read a process's status, in the time that is left for its user's.

        By the owner of /proc/PID, before it may vanish. Raises OSError or ValueError as Proc.status
        does, TimeoutError where no time is left.
        """
        user = 0
        if self._reading > UNCHARGED:
            user = self._user_of(pid)
            if self._charged.get(user, 0.0) > ONE_USER:
                why = f"no time for process {pid} of uid {user}"
                raise TimeoutError(self._missed.setdefault(user, why))
        begun = time.monotonic()
        status = self.proc.status(pid)
        seconds = time.monotonic() - begun
        self._reading += seconds
        if user:
            self._charged[user] = self._charged.get(user, 0.0) + seconds
        if status.groups is UNREAD:
            for one in (
                user or self._user_of(pid),
                status.uids[0],
            ):  # also of a set-user-id program
                self._missed.setdefault(one, f"process {pid} has too many groups to be read")
        return status

    def _user_of(self, pid: int) -> int:
        """Return the user who answers for a process, 0 for the system's; raise OSError.

        Where namespaces may not be seen, each uid answers for itself.
        """
        try:
            uid = os.stat(f"{self.proc.root}/{pid}").st_uid
        except FileNotFoundError as gone:
            raise ProcessLookupError(*gone.args) from gone
        try:
            return self.account(pid, uid) if uid >= SYSTEM_UIDS else 0
        except PermissionError:
            return uid

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
        late = begun + LONGEST - self._spent
        for pid, inode in self._list_unread(first).items():
            if time.monotonic() > late:
                self.partial = self.complete = True
                self.blind = f"no time for process {pid}: the others took {LONGEST:.0f} s"
                break
            try:
                if not self._is_left_out(pid):
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
        self._spent += time.monotonic() - begun
        if not vanished and not first:
            self.complete = True
        elif self._listings == ROUNDS and not self.complete:
            self.complete = True
            if not self.blind:
                self.restless = True
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
        return {pid: inode for pid, inode in listed.items() if read.get(pid) != inode}

    def _is_left_out(self, pid: int) -> bool:
        """Return whether a process is of none of the users who are asked for, root, or the system.

        By the owner of /proc/PID, which is the effective uid, also where the files in it are root's
        (a process that is not dumpable): a sixth of what a status costs. One that vanished
        meanwhile may be anybody's: it is looked at more closely.
        """
        if self._users is None:
            return False
        try:
            uid = os.stat(f"{self.proc.root}/{pid}").st_uid
            return self._is_of_others(pid, uid, self._users)
        except OSError:
            return False

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
        try:  # the kernel answers at one moment: no process can fork away from it
            os.getpriority(os.PRIO_USER, uid)
        except ProcessLookupError:
            return may_have_subordinate_uids(uid, (self._users or {}).get(uid, ""))
        self._running.add(uid)
        return True

    def why_blind_about(self, uid: "int | None", gid: int = 0) -> str:
        """Return why processes of a user, of anybody, or of a group may have been missed."""
        if uid is None:
            return self.blind or next(iter(self._missed.values()), "")
        missed = self._missed.get(uid, "")
        return missed if self.restless and not self.may_fork(uid, gid) else self.blind or missed

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
        found: "list[tuple[set[int], frozenset[int]]]" = []
        late = time.monotonic() + SAMPLING
        try:
            before = self.proc.last_pid()
            while time.monotonic() < late and len(found) < SAMPLES:
                last = self.proc.last_pid()
                for pid in range(last, max(before, last - MANY), -1):
                    try:
                        try:
                            status = self._read_status(pid)
                        except TimeoutError:
                            found.append(({self._user_of(pid)}, UNREAD))
                            continue
                        uid, uids = status.uids[0], {*status.uids}
                        if uid >= SYSTEM_UIDS:
                            uids.add(self.account(pid, uid))
                    except ProcessLookupError:
                        continue
                    found.append((uids, status.groups))
                before = last
        except (OSError, ValueError, IndexError):
            pass
        return found

    def started_as(self, uid: int) -> "tuple[dict[int, StartedAs], str]":
        """Return what each process of a user was started as, and why there may be more."""
        statuses = self.seen if self.sealed else self.statuses()
        if self.complete and not any(
            [one.uids[0] == uid and not one.kernel for one in statuses.values()]
        ):
            return {}, ""
        user = self._environs_of(uid)
        if not (user.complete or self.sealed):
            user.read_all(statuses)
        return user.started, user.missed if user.complete else f"uid {uid} {NOT_READ}"

    def read_start(self, pid: int, uid: int) -> "StartedAs":
        """Return what a process of a user was started as; raise OSError where that is not seen."""
        user = self._environs_of(uid)
        if self.sealed and pid not in user.started:
            raise TimeoutError(f"process {pid} {NOT_READ}")
        return user.read(pid)

    def _environs_of(self, uid: int) -> "UserEnvirons":
        if uid not in self._environs:
            from gpulock.alloc.environs import UserEnvirons

            self._environs[uid] = UserEnvirons(uid, self.proc)
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
