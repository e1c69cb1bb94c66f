# SPDX-License-Identifier: Apache-2.0
"""What of a Slurm job is on this node: its step daemons, its cgroup, a hook at work for it.

Hot. A step daemon is root's process `slurmstepd` with `slurmstepd: [JOB.STEP]` in its command
line; the child that becomes a task has the same title but is the user's (docs/facts/slurm.md).
Nothing in it names the node, so where several slurmd share a machine a step of any of them keeps
the job alive.
"""

import os

from gpulock.alloc.process_owner import ProcessTree
from gpulock.alloc.process_scan import ProcessScan
from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.store import atomic
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

STEPD, SLURMD = "slurmstepd", "slurmd"
TITLE = "slurmstepd: ["
EXTERN = "extern"  # the step of PrologFlags=Contain: there for the whole of an allocation
CONTEXTS = (b"SLURM_SCRIPT_CONTEXT=prolog_slurmd", b"SLURM_SCRIPT_CONTEXT=epilog_slurmd")
CONTROLLERS = ("freezer", "devices", "memory", "cpuset")  # version 1: what proctrack and task use
PLACEHOLDER = ([b"100000000", b""], [b"infinity", b""])  # slurmstepd/mgr.c
CLIENTS = ("srun", "salloc", "sbatch")  # wait for a while when their job is gone, and hold nothing
# `slurmstepd infinity` keeps the scope of cgroup v2 for ever, `getenv` reads a login environment
NO_STEP = ([b"infinity"], [b"getenv"])
INIT = 1  # is no hook, and may hide its environment even from root
DEPTH = 5  # job / step / user / task, and one to spare


class SlurmSteps:
    """Who is there of which job; `uid` is root's, or of a simulation its user's."""

    __slots__ = ("_cgroup", "_uid")

    def __init__(self, settings: Settings) -> None:
        self._cgroup = f"{settings.sys_root}/fs/cgroup"
        self._uid = os.geteuid() if settings.simulation else 0

    def attach(self, held: dict[str, Lock], scan: ProcessScan) -> None:
        """Tell every Slurm lock of `held` its processes (pid, start time), daemons first.

        Also what has left its parents, by cgroup or environment: it is of that job all the same.
        """
        locks = [lock for lock in held.values() if lock.owner and lock.owner.scheduler == "slurm"]
        if not locks:
            return
        found = self.daemons(scan)
        for lock in locks:
            assert lock.owner is not None
            mine = found.get(lock.owner.job_id, {})
            rest = self.members(lock.owner, scan)
            if not self.has_cgroup(lock.owner):
                rest = self.find_by_environ(lock.owner, scan)
            lock.steps = find_start_times(
                scan.proc, [*mine, *[p for p in rest if p and p not in mine]]
            )
            lock.extern = EXTERN in mine.values()

    def daemons(self, scan: ProcessScan) -> dict[str, dict[int, str]]:
        """Return pid -> step of all step daemons by job id; those without a title yet under ``."""
        found: dict[str, dict[int, str]] = {}
        for pid in scan.named(STEPD):
            if set(scan.status(pid).uids[:3]) == {self._uid}:
                try:
                    title = scan.proc.read_memory(pid, "cmdline")
                except ProcessLookupError:
                    continue
                except TimeoutError:
                    title = b""  # whose it is nobody knows
                if title.split(b"\0")[1:2] in NO_STEP:
                    continue
                job, step = parse_stepd_title(title)
                found.setdefault(job, {})[pid] = step
        return found

    def is_slurmd_seen(self, scan: ProcessScan) -> bool:
        """Return whether slurmd runs where we can see it."""
        return any([scan.status(p).uids[0] == self._uid for p in scan.named(SLURMD)])

    def describe_leftover(self, lock: Lock, scan: ProcessScan) -> str:
        """Return which process of the job is left, as a clause, or nothing.

        Where Slurm keeps no cgroup (proctrack/linuxproc, pgid), a job's processes are recognised
        by the environment that slurmstepd gave them. A user can remove it, but a device that is
        open then is still found; a user who fakes it keeps only the lock of their own job.
        """
        assert lock.owner is not None
        for pid in self.members(lock.owner, scan):
            return f"process {pid} is in the job's cgroup"
        if self.has_cgroup(lock.owner):
            return ""  # which lists them all, whatever a process says of itself
        found, unseen = self._find_by_environ(lock.owner, scan)
        return f"process {found[0]} of the job runs" if found else unseen

    def find_by_environ(self, record: Owner, scan: ProcessScan) -> list[int]:
        """Return the user's processes that are seen to be started as this job's on this node."""
        return self._find_by_environ(record, scan)[0]

    def _find_by_environ(self, record: Owner, scan: ProcessScan) -> tuple[list[int], str]:
        """Return those, and why there may be more: the first one that hangs ends the look."""
        jobs = {f"SLURM_JOB_ID={job}".encode() for job in (record.job_id, record.het_leader) if job}
        node = f"SLURMD_NODENAME={record.slurmd}".encode()
        found: list[int] = []
        for pid, status in scan.statuses().items():
            if status.kernel or status.uids[0] != record.uid or pid == INIT:
                continue
            if status.name in CLIENTS:
                continue
            try:
                words = scan_process_environ(pid, scan)
            except TimeoutError as fault:
                return found, str(
                    fault
                )  # of this user alone: the judge of other users' jobs is not affected
            if not jobs.isdisjoint(words) and node in words and not is_slurm_hook_environ(words):
                found.append(pid)
        return found, ""

    def describe_leftover_or_step(self, lock: Lock, scan: ProcessScan) -> str:
        """Return what is left, step daemons included: for a prolog, before its own steps start."""
        assert lock.owner is not None
        for pid in self.daemons(scan).get(lock.owner.job_id, {}):
            return f"step daemon {pid} of the job runs"
        return self.describe_leftover(lock, scan)

    def has_cgroup(self, record: Owner) -> bool:
        """Return whether the job's own cgroup is there: else it may have another name."""
        return any([os.path.isdir(folder) for folder in slurm_cgroup_paths(self._cgroup, record)])

    def members(self, record: Owner, scan: ProcessScan) -> list[int]:
        """Return the processes in the job's cgroup; what cannot be read counts as pid 0."""
        found: set[int] = set()
        for folder in slurm_cgroup_paths(self._cgroup, record):
            found.update(list_slurm_cgroup_pids(folder, DEPTH))
        return sorted([pid for pid in found if not (pid and self._is_placeholder(pid, scan))])

    def _is_placeholder(self, pid: int, scan: ProcessScan) -> bool:
        """Return whether a process is the extern step's own `sleep`, which outlives its daemon."""
        try:
            if scan.proc.status(pid).uids[0] != self._uid:
                return False
            words = scan.proc.read_memory(pid, "cmdline").split(b"\0")
        except (OSError, ValueError):
            return False
        return words[0].rpartition(b"/")[2] == b"sleep" and words[1:] in PLACEHOLDER

    def find_running_hook(self, record: Owner, scan: ProcessScan) -> int:
        """Return the pid of a Prolog or Epilog that runs for the job here, 0 where none does."""
        wanted = f"SLURM_JOB_ID={record.job_id}".encode()
        node = f"SLURMD_NODENAME={record.slurmd}".encode()
        for pid, status in scan.statuses().items():
            if status.kernel or status.uids[0] != self._uid or pid == INIT:
                continue
            try:
                words = scan_process_environ(pid, scan)
            except TimeoutError as fault:
                scan.mark_blind(str(fault))
                return 0
            ours = wanted in words and node in words and is_slurm_hook_environ(words)
            if ours and not self._is_below_user(pid, scan):
                return pid
        return 0

    def _is_below_user(self, pid: int, scan: ProcessScan) -> bool:
        """Return whether an ordinary user is above a process, below the slurmd that it is of.

        A user's sudo or su is root's, with an environment of the user's. One whose parents have
        all ended is init's child like any hook that slurmd left, and passes for one: it keeps a
        dead job's lock, and frees none.
        """
        statuses = scan.statuses()
        for _ in range(len(statuses)):
            status = statuses.get(pid)
            if status is None or pid == INIT:
                return False
            if status.uids[0] not in (0, self._uid):
                return True
            if set(status.uids) == {self._uid} and is_slurmd(scan.proc, pid):
                return False  # an administrator may have started it by sudo
            pid = status.ppid
        return False


def scan_process_environ(pid: int, scan: ProcessScan) -> list[bytes]:
    """Return what a process was started with; what cannot be seen makes the scan blind.

    Raises TimeoutError for one that hangs.
    """
    try:
        return scan.proc.read_memory(pid, "environ").split(b"\0")
    except TimeoutError:
        raise
    except ProcessLookupError:
        return []
    except OSError as fault:
        scan.mark_blind(f"process {pid} cannot be seen: {fault}")
        return []


def is_slurmd(proc: Proc, pid: int) -> bool:
    """Return whether a process runs a program `slurmd`: a name alone can be given to any.

    Debian's program is `slurmd-wlm`.
    """
    try:
        program = proc.link(pid, "exe")
    except OSError:
        return False
    name = program.removesuffix(" (deleted)").rpartition("/")[2]
    return name.partition("-")[0] == SLURMD


def find_slurmds(node: Node, pid: int) -> list[int]:
    """Return the slurmd above a process of root's, else every slurmd; raise Refusal for none.

    With PrologFlags=RunInJob a Prolog is no child of slurmd's.
    """
    for one, status in ProcessTree(node.proc).ancestry(pid).items():
        if status.name == SLURMD:
            return [one]
    scan = ProcessScan(node.proc)
    found = [one for one in scan.named(SLURMD) if set(scan.status(one).uids[:3]) == {0}]
    found = [one for one in found if is_slurmd(node.proc, one)]
    if not found and not node.settings.simulation:
        raise Refusal(UNKNOWN, "no slurmd is seen", "is /proc mounted with hidepid?")
    return found


def is_slurm_hook_environ(words: list[bytes]) -> bool:
    """Return whether an environment is that of a Prolog or Epilog."""
    return any([context in words for context in CONTEXTS])


def parse_stepd_title(cmdline: bytes) -> tuple[str, str]:
    """Return (job id, step) of `slurmstepd: [12.batch]`, empty ones for another text."""
    text = cmdline.partition(b"\0")[0].decode("utf-8", "replace").rstrip()
    if not (text.startswith(TITLE) and text.endswith("]")):
        return "", ""
    job, dot, step = text[len(TITLE) : -1].partition(".")
    return (job, step) if dot and job.isascii() and job.isdigit() else ("", "")


def is_slurm_job_process(pid: int, record: Owner, tree: ProcessTree) -> bool:
    """Return whether a process is in the job's cgroup or below one of its step daemons.

    Needs no more than an ordinary user may see.
    """
    mine = read_cgroup_paths(tree.proc, pid)
    for folder in slurm_cgroup_paths("", record):
        if any([path == folder or path.startswith(f"{folder}/") for path in mine]):
            return True
    for above, status in tree.ancestry(pid).items():
        if status.name == STEPD and status.uids[0] == 0:
            try:
                job, _ = parse_stepd_title(tree.proc.read_memory(above, "cmdline"))
            except OSError:
                continue
            if job == record.job_id:
                return True
    return False


def read_cgroup_paths(proc: Proc, pid: int) -> set[str]:
    """Return a process's cgroups: the path, in version 1 below each controller's name."""
    try:
        text = proc.read(pid, "cgroup").decode("utf-8", "replace")
    except OSError:
        return set()
    found: set[str] = set()
    for line in text.split("\n"):  # a user names cgroups, with any other end of line
        controllers, _, path = line.partition(":")[2].partition(":")
        if path:
            found.update([f"/{name}{path}" if name else path for name in controllers.split(",")])
    return found


def find_start_times(proc: Proc, pids: list[int]) -> list[tuple[int, int]]:
    """Return (pid, start time) of each process that is still there."""
    found: list[tuple[int, int]] = []
    for pid in pids:
        try:
            found.append((pid, proc.start(pid)))
        except (ProcessLookupError, ValueError):
            continue
    return found


def slurm_cgroup_paths(root: str, record: Owner) -> list[str]:
    """Return the folders that a job's cgroup may have."""
    first, second = slurm_cgroup_roots(root, record.slurmd)
    tail = f"uid_{record.uid}/job_{record.job_id}"
    return [*[f"{top}/{tail}" for top in first], *[f"{top}/job_{record.job_id}" for top in second]]


def slurm_cgroup_roots(root: str, slurmd: str) -> tuple[list[str], list[str]]:
    """Return where slurmd keeps its jobs' cgroups, of version 1 and 2 (named, if several run)."""
    tops = ("slurm", f"slurm_{slurmd}")
    scopes = ("slurmstepd.scope", f"{slurmd}_slurmstepd.scope")
    return (
        [f"{root}/{part}/{top}" for part in CONTROLLERS for top in tops],
        [f"{root}/system.slice/{scope}" for scope in scopes],
    )


def list_slurm_cgroup_pids(folder: str, depth: int) -> list[int]:
    """Return the processes of a cgroup and of those below it; [0] where that cannot be read."""
    try:
        with_names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError:
        return [0]
    found: list[int] = []
    for name in with_names:
        inner = f"{folder}/{name}"
        try:
            if name == "cgroup.procs":
                found += [int(pid) for pid in atomic.read_text(inner, 1 << 22).split()]
            elif depth and os.path.isdir(inner):
                found += list_slurm_cgroup_pids(inner, depth - 1)
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, ValueError):
            found.append(0)
    return found
