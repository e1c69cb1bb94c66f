# SPDX-License-Identifier: Apache-2.0
"""Whether a Grid Engine job is alive, from the node alone (docs/facts/grid-engine.md).

Hot, loaded when a lock must be judged. Not the spool directory (it stays for seconds after
the end and vanishes while processes live), not qstat (`qdel -f` drops a job whose process lives).
"""

import errno
import os

from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import OVER
from gpulock.sge import spool
from gpulock.store import atomic
from gpulock.store.locks import Lock
from gpulock.store.verdicts import ALIVE, DEAD, UNKNOWN, Verdict

EXECD = "sge_execd"
UNREADABLE_GROUP = -1  # stands for the group of a shepherd that does not show it


class SgeJobRule:
    """Judge locks of Grid Engine; `simulated` ones have no group and no execd."""

    __slots__ = ("_gids", "_sight", "_simulated", "_sys_root")

    def __init__(self, simulated: bool = False, sys_root: str = "/sys") -> None:
        self._sys_root = sys_root
        self._simulated = simulated
        self._sight: "str | None" = None
        self._gids: "dict[int, list[int]] | None" = None

    def __call__(self, lock: Lock, scan: ProcessScan) -> Verdict:
        record = lock.owner
        assert record is not None
        for pid, start in lock.shepherds():
            try:
                if scan.proc.running(pid, start):
                    return Verdict(ALIVE, f"its shepherd {pid} runs")
            except (OSError, ValueError) as fault:
                return Verdict(UNKNOWN, f"its shepherd {pid} cannot be seen: {fault}")
        blind = "" if self._simulated else self.why_blind(scan, record.uid)
        if blind:
            return Verdict(UNKNOWN, blind)
        if not record.add_grp_id:
            return self.without_group(lock, scan)
        found = [self.by_group(gid, record.uid, scan) for gid in lock.groups()]
        for state in (ALIVE, UNKNOWN):
            for verdict in found:
                if verdict.state == state:
                    return verdict
        return found[0]

    def why_blind(self, scan: ProcessScan, uid: int) -> str:
        """Return why this judge cannot see what it must, or nothing: execd and its directory."""
        if self._sight is None:
            self._sight = why_execd_hidden(scan)
        return scan.why_blind_about(uid) or self._sight

    def by_group(self, gid: int, uid: int, scan: ProcessScan) -> Verdict:
        """Judge by the job's supplementary group, which execd may hand out again."""
        carriers = scan.carriers(gid)
        if not carriers:
            if blind := scan.why_blind_about(uid, gid):
                return Verdict(UNKNOWN, blind)
            return Verdict(DEAD, f"its shepherd is gone, no process carries its group {gid}")
        if self._gids is None:
            self._gids = find_shepherd_groups(scan)
        heirs = self._gids.get(gid, [])
        if not heirs:
            return Verdict(ALIVE, f"its process {carriers[0]} runs without a shepherd")
        strays = [p for p in carriers if not scan.descends(p, frozenset(heirs))]
        if strays:
            return Verdict(
                UNKNOWN, f"process {strays[0]} carries its group {gid}, now another job's"
            )
        return Verdict(DEAD, f"its shepherd is gone, its group {gid} is another job's now")

    def without_group(self, lock: Lock, scan: ProcessScan) -> Verdict:
        """Judge a job that has no supplementary group: by its unit, in a simulation its session."""
        record = lock.owner
        assert record is not None
        if not self._simulated:
            return judge_systemd_unit(self._sys_root, record.scope)
        members = scan.session_members(record.sid)
        if members:
            return Verdict(ALIVE, f"its process {members[0]} runs without a shepherd")
        return Verdict(DEAD, "its shepherd is gone, its session is empty")


def judge_systemd_unit(sys_root: str, unit: str) -> Verdict:
    """Judge a job whose shepherd is gone by the cgroup of its unit of systemd.

    The kernel says at one moment whether a process is in it or below. That proves life, in the tree
    of version 2 that has process 1 where systemd puts itself. It never proves death: a shepherd
    that could not reach systemd runs its job outside of any unit (facts/grid-engine.md).
    """
    if not unit:
        return Verdict(UNKNOWN, "its record names no supplementary group")
    top = f"{sys_root}/fs/cgroup"
    if os.path.exists(f"{top}/unified/cgroup.procs"):
        top = f"{top}/unified"
    try:
        if "1" not in atomic.read_text(f"{top}/init.scope/cgroup.procs").split("\n"):
            return Verdict(UNKNOWN, f"{top} is not the tree of this node's systemd")
    except OSError as fault:
        return Verdict(UNKNOWN, f"the units of systemd cannot be seen: {fault}")
    try:
        events = atomic.read_text(f"{top}{unit}/cgroup.events")
    except OSError as fault:
        if fault.errno not in (errno.ENOENT, errno.ENODEV):
            return Verdict(UNKNOWN, f"its unit {unit} cannot be seen: {fault}")
        events = "populated 0"
    if "populated 0" not in events.split("\n"):
        return Verdict(ALIVE, f"processes run in its unit {unit}")
    return Verdict(UNKNOWN, f"its unit {unit} is empty, but its processes may be outside of it")


def why_execd_hidden(scan: ProcessScan) -> str:
    """Return why Grid Engine cannot be seen from here, or nothing.

    execd must be there (no hidden or foreign /proc) and its directory readable (CAP_SYS_PTRACE).
    """
    daemons = find_root_processes(scan, EXECD)
    if not daemons:
        return "no sge_execd is visible: is it down, or is this a container?"
    reason = ""
    for pid in daemons:
        try:
            scan.proc.link(pid, "cwd")
            return ""
        except OSError as fault:
            reason = f"sge_execd's directory cannot be seen: {fault}"
    return reason


def find_root_processes(scan: ProcessScan, name: str, uid: int = 0) -> list[int]:
    """Return root's processes of one name (in a simulation its owner's, `uid`).

    Anybody can give a process any name.
    """
    return [pid for pid in scan.named(name) if scan.status(pid).uids[0] == uid]


def find_shepherd_groups(scan: ProcessScan) -> dict[int, list[int]]:
    """Return the supplementary group of each living shepherd's job, with those shepherds.

    Those whose group cannot be read are below UNREAD.
    """
    found: dict[int, list[int]] = {}
    places = find_active_jobs_folders(scan)
    for pid in find_shepherds(scan):
        if not is_in_spool_folder(scan, pid, places):
            continue  # a fork in a folder of that name which a user made
        try:
            path = f"{scan.proc.root}/{pid}/cwd/config"
            text = atomic.read_text(path, spool.CONFIG_LIMIT)
            gid = int(spool.parse_shepherd_config(text)["add_grp_id"][0])
        except (OSError, ValueError, KeyError):
            if has_process_ended(scan, pid):
                continue
            gid = UNREADABLE_GROUP
        found.setdefault(gid, []).append(pid)
    return found


def find_shepherds(scan: ProcessScan, uid: int = 0) -> list[int]:
    """Return the living shepherds, but for what they fork to become a hook or a job.

    Such a fork opens the job's output first, and hangs there for ever where a user made that a
    FIFO, its shepherd dead or not. It is in a folder of the user's by then, which says nothing.
    """
    named = find_root_processes(scan, spool.SHEPHERD_NAME, uid)
    return [
        pid for pid in named if scan.status(pid).ppid not in named and is_in_spool_folder(scan, pid)
    ]


def find_active_jobs_folders(scan: ProcessScan) -> tuple[str, ...]:
    """Return where the jobs of each execd that runs have their folders."""
    found: list[str] = []
    for pid in find_root_processes(scan, EXECD):
        try:
            found.append(f"{scan.proc.link(pid, 'cwd')}{spool.ACTIVE_JOBS}")
        except OSError:
            continue
    return tuple(found)


def is_in_spool_folder(scan: ProcessScan, pid: int, places: tuple[str, ...] = ()) -> bool:
    """Return whether a process is in a job's spool directory, as a shepherd always is.

    `places` are where those are, none where no execd tells. One that cannot be seen may be there.
    """
    try:
        cwd = scan.proc.link(pid, "cwd")
    except OSError:
        return True
    return cwd.startswith(places) if places else spool.ACTIVE_JOBS in cwd


def has_process_ended(scan: ProcessScan, pid: int) -> bool:
    """Return whether a process has ended since it was listed."""
    try:
        return scan.proc.stat(pid).state in OVER and scan.proc.finished(pid)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
