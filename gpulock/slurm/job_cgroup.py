# SPDX-License-Identifier: Apache-2.0
"""Where Slurm keeps the cgroup of a job, and who is in it.

Hot. Version 2 has `SLICE/[NODE_]slurmstepd.scope/JOB`, where JOB is `job_N`, or from 26.05 on the
job's SLUID, which its Prolog was told (docs/facts/slurm.md, cgroups of a job).
"""

import os

from gpulock.node.procfs import Proc
from gpulock.store import atomic
from gpulock.store.owner import Owner

CONTROLLERS = ("freezer", "devices", "memory", "cpuset")  # version 1: what proctrack and task use
SLICE, SCOPE = "system.slice", "slurmstepd.scope"  # CgroupSlice of 25.11 may name another
SLUID = 14  # characters: an s, and 13 digits of base 32
INIT = 1
PIDS_LIMIT = 1 << 22  # bytes of a list of processes
DEPTH = 5  # job / step / user / task, and one to spare


def find_job_cgroups(root: str, record: Owner, proc: Proc) -> tuple[list[str], list[str]]:
    """Return the folders that a job's cgroup may have below `root` (/sys/fs/cgroup), and the tops.

    A top is where the job's slurmd keeps cgroups: there is none with proctrack/linuxproc alone.
    """
    tops = [f"{root}/{part}/{top}" for part in CONTROLLERS for top in slurm_tops_v1(record)]
    tops = [top for top in tops if os.path.isdir(top)]
    scopes = slurm_scope_folders(root, record, proc)
    folders = [f"{top}/{job_tail_v1(record)}" for top in tops]
    folders += [f"{scope}/{name}" for scope in scopes for name in job_cgroup_names(record)]
    return folders, [*tops, *scopes]


def slurm_scope_folders(root: str, record: Owner, proc: Proc) -> list[str]:
    """Return the scopes of version 2 in which the slurmd of a job keeps cgroups."""
    scopes: list[str] = []
    for base in init_cgroup_bases(proc):
        try:
            slices = os.listdir(f"{root}{base}")
        except OSError:
            slices = [SLICE]  # where it cannot be read, nor can what is below
        scopes += [f"{root}{base}/{one}/{name}" for one in slices for name in scope_names(record)]
    return [scope for scope in scopes if os.path.isdir(scope)]


def job_tail_v1(record: Owner) -> str:
    """Return where a job is below the folder of its slurmd, in version 1."""
    return f"uid_{record.uid}/job_{record.job_id}"


def slurm_tops_v1(record: Owner) -> tuple[str, str]:
    """Return what the folder of a job's slurmd may be called in each controller of version 1."""
    return "slurm", f"slurm_{record.slurmd}"


def job_cgroup_names(record: Owner) -> tuple[str, ...]:
    """Return what a job's folder of version 2 may be called."""
    return (f"job_{record.job_id}", record.sluid) if record.sluid else (f"job_{record.job_id}",)


def scope_names(record: Owner) -> tuple[str, str]:
    """Return what the scope of a job's slurmd may be called: named, if several may run."""
    return SCOPE, f"{record.slurmd}_{SCOPE}"


def init_cgroup_bases(proc: Proc) -> list[str]:
    """Return the folders in which the slices may be: the root, or where PID 1 has its own.

    In a container the path in /proc/1/cgroup may begin above what is mounted: each rest of it is
    tried. Only root can make a folder in any of them.
    """
    bases = [""]
    for path in read_cgroup_paths(proc, INIT, "0::"):
        parts = path.split("/")[1:-1]
        bases += ["/" + "/".join(parts[n:]) for n in range(len(parts))]
    return list(dict.fromkeys(bases))


def read_cgroup_paths(proc: Proc, pid: int, kind: str = "") -> set[str]:
    """Return a process's cgroups: the path, in version 1 below each controller's name.

    `kind` is what a line begins with: `0::` for version 2 alone.
    """
    try:
        text = proc.read(pid, "cgroup").decode("utf-8", "replace")
    except OSError:
        return set()
    paths: set[str] = set()
    for line in text.split("\n"):  # a user names cgroups, with any other end of line
        controllers, _, path = line.partition(":")[2].partition(":")
        if path and line.startswith(kind):
            paths.update([f"/{name}{path}" if name else path for name in controllers.split(",")])
    return paths


def is_in_job_cgroup(pid: int, record: Owner, proc: Proc) -> bool:
    """Return whether a process is in the job's cgroup, where Slurm keeps them.

    A user may have cgroups of any name, below a folder of the user's own.
    """
    mine = read_cgroup_paths(proc, pid)
    tails = [f"{top}/{job_tail_v1(record)}/" for top in slurm_tops_v1(record)]
    first = tuple([f"/{part}/{tail}" for part in CONTROLLERS for tail in tails])
    if any([f"{path}/".startswith(first) for path in mine]):
        return True
    for path in mine:
        above, name = split_scope_path(path, record)
        if name in job_cgroup_names(record) and above.rpartition("/")[0] in init_cgroup_bases(proc):
            return True
    return False


def why_in_slurm_cgroup(pid: int, record: Owner, proc: Proc) -> str:
    """Return why a process of the job's user may be of the job, by its cgroup's name alone.

    Wherever that cgroup is mounted; a user who makes one keeps the lock of the own job. Without
    the job's SLUID any job's may be this job's.
    """
    for path in read_cgroup_paths(proc, pid):
        name = split_scope_path(path, record)[1]
        if name in job_cgroup_names(record) or f"/{job_tail_v1(record)}/" in path:
            return f"process {pid} is in the job's cgroup"
        if not record.sluid and is_sluid(name):
            return f"process {pid} is in a cgroup of Slurm's, of which job is not known"
    return ""


def split_scope_path(path: str, record: Owner) -> tuple[str, str]:
    """Return (the slice, the job's name) of a path in the scope of a job's slurmd, else empty."""
    for scope in scope_names(record):
        above, separator, below = path.partition(f"/{scope}/")
        if separator:
            return above, below.partition("/")[0]
    return "", ""


def is_sluid(name: str) -> bool:
    """Return whether a text is a SLUID: `s5K1...`."""
    return len(name) == SLUID and name[0] == "s" and name.isascii() and name.isalnum()


def list_slurm_cgroup_pids(folder: str, depth: int = DEPTH) -> list[int]:
    """Return the processes of a cgroup and of those below it; [0] where that cannot be read."""
    try:
        with_names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError:
        return [0]
    pids: list[int] = []
    for name in with_names:
        inner = f"{folder}/{name}"
        try:
            if name == "cgroup.procs":
                pids += [int(pid) for pid in atomic.read_text(inner, PIDS_LIMIT).split()]
            elif depth and os.path.isdir(inner):
                pids += list_slurm_cgroup_pids(inner, depth - 1)
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, ValueError):
            pids.append(0)
    return pids
