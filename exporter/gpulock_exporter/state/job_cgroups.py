# SPDX-License-Identifier: Apache-2.0
"""What a claim's job used of the host: processor time and memory, by the job's own cgroup.

The cgroup may be gone when an epilog runs, so it is read once a second while the claim stands. Its
counters are whole: what was missed before is in the next reading, and no more than the last second
of a job is lost. A job without a cgroup of its own is looked for more and more seldom, one of Slurm
at least every other second: its cgroup may come late.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpulock.isolation.marks import read_cgroup_folders
from gpulock.isolation.tree import cgroup_name
from gpulock.node.context import Node
from gpulock.slurm.job_cgroup import job_cgroup_folders, job_cgroup_paths_v1
from gpulock.store import atomic
from gpulock.store.owner import Owner

LONGEST_PAUSE = 32.0  # seconds between two searches for a cgroup that is not there
SLURM_PAUSE = 2.0  # the same of a job of Slurm, whose cgroup may come once its prologs are over
# what a file says that is not there, or not for us; any other error says nothing of it
UNREADABLE = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR, errno.EACCES, errno.EPERM})
NO_LIMIT = 1 << 60  # bytes: version 1 writes a number near 2^63 for none
NANO, MICRO = 1e-9, 1e-6


@dataclass(frozen=True)
class HostUsage:
    """What a job used on this host; None is not known.

    `cpu_seconds` and `host_memory_peak` (bytes) are what it used, `cpus` and `host_memory` (bytes)
    what it may use at most.
    """

    cpu_seconds: float | None = None
    cpus: int | None = None
    host_memory_peak: int | None = None
    host_memory: int | None = None


class CgroupFiles(NamedTuple):
    """The files of a job's cgroup, each of them may be missing; of `peaks` the first counts."""

    cpu: str  # `cpuacct.usage` in nanoseconds, or `cpu.stat` with `usage_usec`
    peaks: tuple[str, ...]
    limit: str
    cpus: str


@dataclass
class JobReading:
    """What was read of a claim's cgroup so far, and when to search for it again.

    `before` are the seconds of cgroups that the job had earlier: Slurm without an extern step
    makes one for each of the job's steps that follow each other.
    """

    files: CgroupFiles | None = None
    inode: int = 0  # of the cgroup that `last` is of
    pause: float = 0.5
    due: float = 0.0
    before: float = 0.0
    last: float = 0.0
    usage: HostUsage = field(default_factory=HostUsage)


class JobCgroups:
    """The cgroups of the claims that stand, read at each tick."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._jobs: dict[str, JobReading] = {}

    def read(self, owners: Mapping[str, Owner], now: float) -> dict[str, HostUsage]:
        """Return what is known of each claim, by token; raise OSError once each was tried.

        `now` is in seconds of a steady clock.
        """
        self._jobs = {token: self._jobs.get(token) or JobReading() for token in owners}
        fault: OSError | None = None
        for token, job in self._jobs.items():
            try:
                self._read_job(job, owners[token], now)
            except OSError as error:
                fault = error
        if fault:
            raise fault
        blank = HostUsage()
        return {token: job.usage for token, job in self._jobs.items() if job.usage != blank}

    def _read_job(self, job: JobReading, owner: Owner, now: float) -> None:
        if job.files is None and now >= job.due:
            possible = possible_cgroup_files(self._node, owner)
            job.files = next((files for files in possible if cgroup_inode(files)), None)
            longest = SLURM_PAUSE if owner.scheduler == "slurm" else LONGEST_PAUSE
            job.pause = min(job.pause * 2, longest)
            job.due = now + job.pause
        if job.files is not None:
            read_job_cgroup(job, job.files)


def read_job_cgroup(job: JobReading, files: CgroupFiles) -> None:
    """Take a reading; a cgroup that is gone is searched for again at once.

    Raise OSError where the kernel gives no answer now: then nothing is known to be gone.
    """
    inode, spent = cgroup_inode(files), read_cpu_seconds(files.cpu)
    known_peaks = (one for one in map(read_cgroup_bytes, files.peaks) if one is not None)
    peak = next(known_peaks, None)  # the other is read where the first is not there
    if not inode:
        job.files, job.pause, job.due = None, 0.5, 0.0
        return
    known = job.usage
    if spent is not None:
        if spent < job.last or inode != job.inode:  # another cgroup: its counter began at 0
            job.before += job.last
        job.last, job.inode = spent, inode
        known = replace(known, cpu_seconds=job.before + spent)
    if peak is not None:
        known = replace(known, host_memory_peak=max(peak, known.host_memory_peak or 0))
    limit = read_cgroup_bytes(files.limit)
    job.usage = replace(
        known,
        cpus=count_cpu_list(read_cgroup_text(files.cpus)) or known.cpus,
        host_memory=limit if limit and limit < NO_LIMIT else known.host_memory,
    )


def cgroup_inode(files: CgroupFiles) -> int:
    """Return which cgroup the files are of, 0 where it is not there; raise OSError."""
    for path in (files.cpu, *files.peaks):
        try:
            if os.stat(path):
                return os.stat(os.path.dirname(path)).st_ino
        except OSError as fault:
            if fault.errno not in UNREADABLE:
                raise
    return 0


def possible_cgroup_files(node: Node, owner: Owner) -> Iterator[CgroupFiles]:
    """Yield the files of each cgroup that may be the job's: only root can make one of its name."""
    root = f"{node.settings.sys_root}/fs/cgroup"
    if owner.scheduler == "slurm":
        for path in job_cgroup_paths_v1(owner):
            if path.startswith("/memory/"):
                yield cgroup_files_v1(root, path[len("/memory") :])
        for folder in job_cgroup_folders(root, owner, node.proc):
            yield cgroup_files_v2(folder)
    elif owner.scheduler == "sge" and owner.scope:
        unified = f"{root}/unified"
        top = unified if os.path.exists(f"{unified}/cgroup.procs") else root
        yield cgroup_files_v2(f"{top}{owner.scope}")
    elif owner.scheduler == "sge":  # ISOLATION=cgroup
        name = cgroup_name(f"{owner.job_id}.{owner.task_id or 1}", owner.pid, owner.start)
        try:
            outer = read_cgroup_folders(node.store)
        except OSError:
            return
        for folder in outer:
            yield cgroup_files_v2(f"{folder}/{name}")


def cgroup_files_v1(root: str, path: str) -> CgroupFiles:
    """Return the files of a job in the hierarchies of version 1."""
    memory = f"{root}/memory{path}/memory"
    return CgroupFiles(
        f"{root}/cpuacct{path}/cpuacct.usage",
        (f"{memory}.max_usage_in_bytes",),
        f"{memory}.limit_in_bytes",
        f"{root}/cpuset{path}/cpuset.cpus",
    )


def cgroup_files_v2(folder: str) -> CgroupFiles:
    """Return the files of a cgroup of version 2; before Linux 5.19 the peak is the most we see."""
    return CgroupFiles(
        f"{folder}/cpu.stat",
        (f"{folder}/memory.peak", f"{folder}/memory.current"),
        f"{folder}/memory.max",
        f"{folder}/cpuset.cpus.effective",
    )


def read_cpu_seconds(path: str) -> float | None:
    """Return the seconds of processor time in a file of either version."""
    text = read_cgroup_text(path)
    if text.startswith("usage_usec "):
        word = text.split()[1]
        return int(word) * MICRO if word.isdecimal() else None
    word = text.strip()
    return int(word) * NANO if word.isdecimal() else None


def read_cgroup_bytes(path: str) -> int | None:
    """Return the number in a file, None for `max`, and where there is none."""
    text = read_cgroup_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_cgroup_text(path: str) -> str:
    """Return a file of the kernel's, nothing where there is none for us; raise OSError."""
    try:
        return atomic.read_text(path)
    except ValueError:
        return ""
    except OSError as fault:
        if fault.errno not in UNREADABLE:
            raise
        return ""


def count_cpu_list(text: str) -> int | None:
    """Return how many processors `0-3,8` names, None where it names none."""
    total = 0
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return None
        total += int(last) - int(first) + 1 if dash else 1
    return total or None
