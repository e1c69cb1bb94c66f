# SPDX-License-Identifier: Apache-2.0
"""Whose the processes on a device are: the lock owner's, a service's, or foreign.

NVML tells pids; /proc tells the rest, read as an ordinary user and only of those processes and
what is above them. What cannot be seen is not foreign: it is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from gpulock.alloc.device_users import DAEMONS
from gpulock.alloc.liveness import is_system_process, program_names
from gpulock.node.procfs import Proc, ProcessStatus
from gpulock.slurm.steps import STEPD, parse_stepd_title, slurm_cgroup_paths
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock_exporter.telemetry import Process

INIT = 1
HOST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's proc_ns.h
COMM = 15  # characters of a process's name, proc_pid_comm(5)
DEPTH = 64  # ancestors that are looked at


class ProcessClass(Enum):
    """Whose a process is; GONE ended since it was listed."""

    OWNERS = "owner's"
    SERVICE = "service"
    FOREIGN = "foreign"
    UNSEEN = "unseen"
    GONE = "gone"


@dataclass(frozen=True)
class DeviceProcesses:
    """Who is on one device: how many processes NVML listed, and what they turned out to be.

    `at` is when it listed them, CLOCK_BOOTTIME seconds.
    """

    listed: int
    foreign: tuple[int, ...] = ()
    unseen: int = 0
    at: float | None = None


class ProcessTree:
    """The processes that are asked for, with what is above them; one look, each read once."""

    def __init__(self, proc: Proc) -> None:
        self.proc = proc
        self._statuses: dict[int, ProcessStatus | None] = {}
        self._sees_all: bool | None = None

    def status(self, pid: int) -> ProcessStatus | None:
        """Return a process's status, None for one that is gone; raise OSError where hidden."""
        if pid not in self._statuses:
            try:
                self._statuses[pid] = self.proc.status(pid)
            except ProcessLookupError:
                self._statuses[pid] = None
            except ValueError as fault:
                raise PermissionError(f"process {pid} cannot be understood: {fault}") from fault
        return self._statuses[pid]

    def sees_all(self) -> bool:
        """Return whether a process that is not shown is gone: no hidepid, and the host's pids."""
        if self._sees_all is None:
            try:
                host = HOST_PIDS in self.proc.pid_namespace()
                self._sees_all = host and self.status(INIT) is not None
            except OSError:
                self._sees_all = False
        return self._sees_all

    def ancestry(self, pid: int) -> list[tuple[int, ProcessStatus]]:
        """Return a process and what is above it, as far as that can be seen."""
        found: list[tuple[int, ProcessStatus]] = []
        while pid > 0 and len(found) < DEPTH:
            try:
                status = self.status(pid)
            except OSError:
                break
            if status is None:
                break
            found.append((pid, status))
            pid = status.ppid
        return found

    def cgroup_paths(self, pid: int) -> set[str]:
        """Return a process's cgroups: the path, in version 1 below each controller's name."""
        try:
            text = self.proc.read(pid, "cgroup").decode("utf-8", "replace")
        except OSError:
            return set()
        found: set[str] = set()
        for line in text.splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            found.update(f"/{name}{path}" if name else path for name in controllers.split(","))
        return found


def classify_device_processes(
    listed: Sequence[Process], locks: Iterable[Lock], kin: ProcessTree, services: Sequence[str]
) -> DeviceProcesses:
    """Return who is on a device, `locks` being those on it, on its card or its instances."""
    holders = list(locks)
    judged = {one.pid: classify_process(one.pid, holders, kin, services) for one in listed}
    foreign = tuple(sorted(pid for pid, of in judged.items() if of is ProcessClass.FOREIGN))
    unseen = sum(of is ProcessClass.UNSEEN for of in judged.values())
    gone = sum(of is ProcessClass.GONE for of in judged.values())
    return DeviceProcesses(len(judged) - gone, foreign, unseen)


def classify_process(
    pid: int, locks: Sequence[Lock], kin: ProcessTree, services: Sequence[str]
) -> ProcessClass:
    """Return whose a process is."""
    try:
        status = kin.status(pid)
    except OSError:
        return ProcessClass.UNSEEN
    if status is None:
        return ProcessClass.GONE if kin.sees_all() else ProcessClass.UNSEEN
    if any(lock.owner is None for lock in locks):
        return ProcessClass.UNSEEN  # of a claim that cannot be read
    line = kin.ancestry(pid)
    if any(is_claim_process(pid, line, lock, kin) for lock in locks):
        return ProcessClass.OWNERS
    return (
        ProcessClass.SERVICE
        if is_allowed_process(pid, line, kin, services)
        else ProcessClass.FOREIGN
    )


def is_claim_process(
    pid: int, line: Sequence[tuple[int, ProcessStatus]], lock: Lock, kin: ProcessTree
) -> bool:
    """Return whether a process is of a claim: by group, session, descent or cgroup.

    `line` is the process and what is above it, `lock` has its details read.
    """
    record = lock.owner
    if record is None:
        return False
    status = line[0][1]
    if not status.groups.isdisjoint(lock.groups()):
        return True
    if record.sid > 0 and status.session == record.sid:
        return True
    above = {one for one, _ in line}
    if any(
        keeper in above and is_same_process_running(keeper, start, kin)
        for keeper, start in lock.shepherds()
    ):
        return True
    return record.scheduler == "slurm" and is_slurm_job_process(pid, line, record, kin)


def is_slurm_job_process(
    pid: int, line: Sequence[tuple[int, ProcessStatus]], record: Owner, kin: ProcessTree
) -> bool:
    """Return whether a process is in the job's cgroup or below one of its step daemons."""
    paths = kin.cgroup_paths(pid)
    for folder in slurm_cgroup_paths("", record):
        if any(path == folder or path.startswith(f"{folder}/") for path in paths):
            return True
    for above, status in line:
        if status.name == STEPD and status.uids[0] == 0:
            try:
                job, _ = parse_stepd_title(kin.proc.read_memory(above, "cmdline"))
            except OSError:
                continue
            if job == record.job_id:
                return True
    return False


def is_allowed_process(
    pid: int, line: Sequence[tuple[int, ProcessStatus]], kin: ProcessTree, services: Sequence[str]
) -> bool:
    """Return whether a process is a named service: a system user's, and from no job.

    An ordinary user may not see which program another user's process runs: its name has to do,
    which only a system user could have forged.
    """
    status = line[0][1]
    if not is_system_process(status) or any(above.name in DAEMONS for _, above in line[1:]):
        return False
    names = program_names(kin.proc, pid) or {status.name}
    return any(name in names or name[:COMM] in names for name in services)


def is_same_process_running(pid: int, start: int, kin: ProcessTree) -> bool:
    """Return whether that very process runs, rather than another one of its pid."""
    try:
        return kin.proc.running(pid, start)
    except (OSError, ValueError):
        return False
