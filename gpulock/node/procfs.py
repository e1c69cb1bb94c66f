# SPDX-License-Identifier: Apache-2.0
"""What /proc says of a process (proc(5)), read one file at a time.

Hot. `root` is a parameter so that tests can show a tree of their own. A process that is gone
raises ProcessLookupError; what may not be seen raises PermissionError: the two are never mixed.
"""

import errno
import os
import stat
import sys

from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.node.timed_read import TimedReader

CHUNK = 1 << 13  # bytes; /proc/PID/status is shorter, unless a process has many groups
FILE_LIMIT = 1 << 20  # bytes: 65,536 groups, the most there can be, fit in
LONG_GROUPS = 1024  # bytes of a list of groups of which one alone is kept
GROUPS_LIMIT = 1 << 15  # bytes: some thousand groups; the set of 65,536 would take 4 MiB of memory
KEPT_GROUPS = 256  # lists of groups: those of the processes of most nodes
UNREAD = frozenset((-1,))  # stands for groups that are too many
STAT_FIELDS = 20  # after the name, up to the start time
UIDS = 4  # real, effective, saved, file system
OVER = ("Z", "X")  # states of a process that has ended, unless a thread of it goes on
TICKS = os.sysconf("SC_CLK_TCK")  # a second, in the start times of processes
INIT = 1
KTHREADD = 2  # the parent of all kernel threads
NS_GET_PARENT, NS_GET_OWNER_UID = 0xB702, 0xB704  # linux/nsfs.h


class ProcessStat:
    """Fields of /proc/PID/stat: parent, state letter, session, start time in clock ticks."""

    __slots__ = ("ppid", "session", "start", "state")

    ppid: int
    state: str
    session: int
    start: int


class ProcessStatus:
    """Fields of /proc/PID/status: name, state letter, parent, user ids, groups, session.

    `uids` are real, effective, saved, file system; `session` is -1 where the file does not tell it
    (NSsid, since Linux 4.1); `kernel` says whether it is a kernel thread, which has no files.
    `groups` are UNREAD where there are too many.
    """

    __slots__ = ("groups", "kernel", "name", "ppid", "session", "state", "uids")

    name: str
    state: str
    ppid: int
    uids: tuple[int, ...]
    groups: frozenset[int]
    session: int
    kernel: bool


def parse_stat(data: bytes) -> ProcessStat:
    """Parse /proc/PID/stat; the name may hold blanks and parentheses: split after the last `)`."""
    rest = data[data.rindex(b")") + 1 :].split()
    if len(rest) < STAT_FIELDS:
        raise ValueError("not a /proc/PID/stat file")
    fields = ProcessStat()
    fields.ppid, fields.state = int(rest[1]), rest[0].decode()
    fields.session, fields.start = int(rest[3]), int(rest[19])
    return fields


def parse_status(data: bytes, known: "dict[bytes, frozenset[int]] | None" = None) -> ProcessStatus:
    """Parse /proc/PID/status; raise ValueError where a line is missing (a tree that is no proc).

    The lines are looked up one after the other: thousands of processes are read in a scan. Most
    have the groups of another: `known` keeps each list once.
    """
    fields = ProcessStatus()
    name = data[: data.index(b"\n")].partition(b":")[2].strip()
    fields.name = name.decode("utf-8", "surrogateescape")
    fields.state = status_line_value(data, b"\nState:").strip()[:1].decode()
    fields.ppid = int(status_line_value(data, b"\nPPid:"))
    fields.uids = tuple([int(uid) for uid in status_line_value(data, b"\nUid:").split()])
    if len(fields.uids) != UIDS:
        raise ValueError("not four user ids")
    line = status_line_value(data, b"\nGroups:")
    known = {} if known is None else known
    if line not in known:
        if len(line) > LONG_GROUPS:
            known.clear()  # a user with subordinate ids may have many such lists
        known[line] = frozenset(map(int, line.split())) if len(line) <= GROUPS_LIMIT else UNREAD
    fields.groups = known[line]
    has_session = b"\nNSsid:" in data
    fields.session = (
        int((status_line_value(data, b"\nNSsid:").split() or [b""])[0]) if has_session else -1
    )
    # a user mode helper is a child of kthreadd as well, but it has memory of its own
    fields.kernel = fields.ppid == KTHREADD and b"\nVmSize:" not in data
    return fields


def status_line_value(data: bytes, key: bytes) -> bytes:
    """Return what follows `key` on its line; raise ValueError where there is none."""
    begin = data.index(key) + len(key)
    end = data.find(b"\n", begin)
    return data[begin:] if end < 0 else data[begin:end]


class Proc:
    """The process tree below `root` (`/proc`).

    `kthreadd` says whether pid 2 is the kernel's, None until `kernel_threads` has looked.
    """

    def __init__(self, root: str = "/proc") -> None:
        self.root = root
        self._groups: dict[bytes, frozenset[int]] = {}
        self.kthreadd: "bool | None" = None
        self._own_users: "int | None" = None
        self._reader: "TimedReader | None" = None

    def read(self, pid: int, name: str) -> bytes:
        """Return the bytes of /proc/PID/NAME; raise ProcessLookupError when the process is gone.

        The first MiB of them at most: a process may make its own environment and command line as
        large as its memory (PR_SET_MM_MAP). A short read is no end: the kernel hands out a list,
        such as that of children, in pieces of a page.
        """
        try:
            fd = os.open(f"{self.root}/{pid}/{name}", os.O_RDONLY)
            try:
                data = b""
                while len(data) < FILE_LIMIT and (piece := os.read(fd, CHUNK)):
                    data += piece
                return data
            finally:
                os.close(fd)
        except FileNotFoundError as gone:
            raise ProcessLookupError(errno.ESRCH, "no such process", str(pid)) from gone

    def read_memory(self, pid: int, name: str, seconds: float = float("inf")) -> bytes:
        """Return /proc/PID/cmdline or environ; raise TimeoutError where the process hangs.

        It has a second, or `seconds` where they are less. Raises what `read` raises as well.
        """
        if self._reader is None:
            from gpulock.node.timed_read import TimedReader

            self._reader = TimedReader()
        return self._reader.read(pid, lambda: self.read(pid, name), seconds)

    def stat(self, pid: int) -> ProcessStat:
        """Return the process's /proc/PID/stat."""
        return parse_stat(self.read(pid, "stat"))

    def status(self, pid: int) -> ProcessStatus:
        """Return the process's /proc/PID/status, with its session in any case."""
        if len(self._groups) > KEPT_GROUPS:
            self._groups.clear()
        fields = parse_status(self.read(pid, "status"), self._groups)
        if fields.session < 0:
            fields.session = self.stat(pid).session
        return fields

    def start(self, pid: int) -> int:
        """Return the start time in clock ticks since boot: with the pid, the process's identity."""
        return self.stat(pid).start

    def pids(self) -> list[int]:
        """Return the process ids that can be seen now."""
        return [int(name) for name in os.listdir(self.root) if name.isdecimal()]

    def inodes(self) -> dict[int, int]:
        """Return the process ids that can be seen now, with the inode of each one's folder.

        A number that is given again has another inode (docs/facts/locking.md).
        """
        with os.scandir(self.root) as listed:
            return {int(one.name): one.inode() for one in listed if one.name.isdecimal()}

    def last_pid(self) -> int:
        """Return the pid that was given last; raise OSError, ValueError or IndexError."""
        return int(atomic.read_text(f"{self.root}/loadavg").split()[-1])

    def namespace_owner(self, pid: int) -> int:
        """Return who made the user namespace of a process, the outermost one below ours.

        -1 where it is in ours. Raises OSError (EACCES without CAP_SYS_PTRACE).
        """
        if self._own_users is None:
            try:
                self._own_users = os.stat(f"{self.root}/self/ns/user").st_ino
            except FileNotFoundError:
                self._own_users = 0  # a kernel without user namespaces
        path = f"{self.root}/{pid}/ns/user"
        try:
            if not self._own_users or os.stat(path).st_ino == self._own_users:
                return -1
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as gone:
            raise ProcessLookupError(errno.ESRCH, "no such process", str(pid)) from gone
        from fcntl import ioctl

        owner = bytes(4)
        try:
            while os.fstat(fd).st_ino != self._own_users:
                owner = ioctl(fd, NS_GET_OWNER_UID, owner)
                above = ioctl(fd, NS_GET_PARENT)
                os.close(fd)
                fd = above
        finally:
            os.close(fd)
        return int.from_bytes(owner, sys.byteorder)

    def kernel_threads(self) -> frozenset[int]:
        """Return the children of kthreadd, which are no job's; nothing where that cannot be told.

        A big node has thousands: to read each one's status is most of a scan. In a container pid 2
        is anybody's process; the kernel's is root's, without parent and memory.
        """
        try:
            if self.kthreadd is None:  # asked once: it neither comes nor goes
                self.kthreadd = False
                data = self.read(KTHREADD, "status")
                fields = parse_status(data)
                real = fields.name == "kthreadd" and fields.ppid == 0 and not any(fields.uids)
                self.kthreadd = real and b"\nVmSize:" not in data
            if not self.kthreadd:
                return frozenset()
            listed = self.read(KTHREADD, f"task/{KTHREADD}/children")
            return frozenset([int(pid) for pid in listed.split()])
        except (OSError, ValueError):
            return frozenset()

    def link(self, pid: int, name: str) -> str:
        """Return where the symlink /proc/PID/NAME points; raise ProcessLookupError when gone."""
        try:
            return os.readlink(f"{self.root}/{pid}/{name}")
        except FileNotFoundError as gone:
            raise ProcessLookupError(errno.ESRCH, "no such process", str(pid)) from gone

    def boot_id(self) -> str:
        """Return the random id of this boot."""
        return atomic.read_head(f"{self.root}/sys/kernel/random/boot_id", 64).decode().strip()

    def namespaces(self, unseen: "str | None" = None) -> str:
        """Return our own pid and time namespace (`pid:[4026531836] time:[4026531834]`).

        In another time namespace the start times of processes read differently. A kernel before
        5.6 has none. Where the pid namespace cannot be seen, return `unseen` or raise OSError.
        """
        try:
            pids = os.readlink(f"{self.root}/self/ns/pid")
        except OSError:
            if unseen is None:
                raise
            return unseen
        try:
            return f"{pids} {os.readlink(f'{self.root}/self/ns/time')}"
        except OSError:
            return pids

    def finished(self, pid: int) -> bool:
        """Return whether a process whose state is one of OVER has no thread left running.

        A leader that called pthread_exit shows Z while its threads go on (and keep its files).
        """
        return not self.find_living_thread(pid)

    def find_living_thread(self, pid: int) -> str:
        """Return the number of a thread that is not over; nothing where all are."""
        try:
            threads = os.listdir(f"{self.root}/{pid}/task")
        except (FileNotFoundError, ProcessLookupError):
            return ""
        for thread in threads:
            try:
                if parse_stat(self.read(pid, f"task/{thread}/stat")).state not in OVER:
                    return thread
            except ProcessLookupError:
                continue
        return ""

    def running(self, pid: int, start: int) -> bool:
        """Return whether that very process (pid and start time) still runs."""
        try:
            fields = self.stat(pid)
        except ProcessLookupError:
            return False
        if fields.start != start:
            return False
        return fields.state not in OVER or not self.finished(pid)


def device_file_key(info: os.stat_result) -> tuple[int, int, int]:
    """Return what tells one device node or simulated node from another."""
    if stat.S_ISCHR(info.st_mode):
        return (info.st_rdev, 0, 0)
    return (0, info.st_dev, info.st_ino)
