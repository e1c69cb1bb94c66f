# SPDX-License-Identifier: Apache-2.0
"""The daemons of Grid Engine on this node: execd, and the shepherds with the groups of their jobs.

Hot, loaded when a lock must be judged. Anybody can give a process any name, and a set-user-id
program runs as root: a daemon is known by its uid and its program.
"""

from gpulock.alloc.process_reader import is_root_program
from gpulock.alloc.process_scan import ProcessScan
from gpulock.sge import spool
from gpulock.store import atomic

EXECD = "sge_execd"
UNREADABLE_GROUP = -1  # stands for the group of a shepherd that does not show it
CONFIG_HEAD = 4096  # bytes: the group is the fourth line; of arguments there may be megabytes


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


def find_root_processes(scan: ProcessScan, name: str) -> list[int]:
    """Return root's processes of one program."""
    named = [pid for pid in scan.named(name) if scan.status(pid).uids[0] == 0]
    return [pid for pid in named if is_root_program(scan.proc, pid, name)]


def find_shepherd_groups(scan: ProcessScan) -> dict[int, list[int]]:
    """Return the supplementary group of each living shepherd's job, with those shepherds.

    Those whose group cannot be read are below UNREADABLE_GROUP.
    """
    groups: dict[int, list[int]] = {}
    for pid in find_shepherds(scan):
        try:
            head = atomic.read_head(f"{scan.proc.root}/{pid}/cwd/config", CONFIG_HEAD)
            text = head.decode("utf-8", "surrogateescape")
            gid = int(spool.parse_shepherd_config(text)["add_grp_id"][0])
        except (OSError, ValueError, KeyError):
            if scan.has_ended(pid):
                continue
            gid = UNREADABLE_GROUP
        groups.setdefault(gid, []).append(pid)
    return groups


def find_shepherds(scan: ProcessScan) -> list[int]:
    """Return the living shepherds, but for what they fork to become a hook or a job.

    Such a fork opens the job's output first, and hangs there for ever where a user made that a
    FIFO, its shepherd dead or not. It is in a folder of the user's by then, of whatever name.
    """
    named = find_root_processes(scan, spool.SHEPHERD_NAME)
    places = find_active_jobs_folders(scan)
    return [
        pid
        for pid in named
        if scan.status(pid).ppid not in named and is_in_spool_folder(scan, pid, places)
    ]


def find_active_jobs_folders(scan: ProcessScan) -> tuple[str, ...]:
    """Return where the jobs of each execd that runs have their folders."""
    folders: list[str] = []
    for pid in find_root_processes(scan, EXECD):
        try:
            folders.append(f"{scan.proc.link(pid, 'cwd')}{spool.ACTIVE_JOBS}")
        except OSError:
            continue
    return tuple(folders)


def is_in_spool_folder(scan: ProcessScan, pid: int, places: tuple[str, ...]) -> bool:
    """Return whether a process is in a job's spool directory, as a shepherd always is.

    `places` are where those are, none where no execd tells. One that cannot be seen may be there.
    """
    try:
        cwd = scan.proc.link(pid, "cwd")
    except OSError:
        return True
    return cwd.startswith(places) if places else spool.ACTIVE_JOBS in cwd
