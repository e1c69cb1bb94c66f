# SPDX-License-Identifier: Apache-2.0
"""A job's isolation: its beginning, its end, and what a reconcile does about it.

Hot, loaded where ISOLATION is not off. A job has a cgroup of its own below its service's, so that
to stop the service still stops the job; it is closed before the job is moved in. Its name tells
the process that stands for the job (shepherd, step daemon), and the kernel keeps the rest: there
is no record of a job to lose. In doubt nothing is opened: what fails at the beginning refuses the
job. A cgroup of ours whose process is gone goes as soon as it is empty; with it goes its program.
A reconcile kills nobody: a job whose shepherd was killed lives on, and stays confined.
"""

import errno
import os

from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal, os_error_kind
from gpulock.isolation import policy, sessions, tree
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.isolation.policy import Rules

STEP, STEP_DAEMONS = "step_", "slurm"  # of JOB/step_0/slurm, which Slurm has beside step_0/user
STEP_MARK = "user.gpulock"  # of a step's folder: who confined it, for its TaskProlog


class IsolatedJob:
    """A job as isolation sees it: a label for people, and the process it descends from."""

    def __init__(self, label: str, pid: int, start: int) -> None:
        self.label = label
        self.pid = pid
        self.start = start
        self.cgroup_name = tree.cgroup_name(label, pid, start)


def prepare_slurm_isolation(node: Node, slurmds: list[int]) -> None:
    """Refuse, before anything is claimed, what this node cannot do for Slurm; its steps come later.

    Each slurmd is closed first: it may run the job's login files. Raises Refusal.
    """
    try:
        tree.find_cgroup_top(node.settings.sys_root)
        for pid in slurmds:
            sessions.close_launcher(node, pid)
    except ProcessLookupError as gone:
        raise Refusal(UNKNOWN, f"slurmd ended meanwhile: {gone}", "nothing to do") from gone
    except (OSError, ValueError) as fault:
        raise Refusal(
            os_error_kind(fault), f"slurmd cannot be closed: {fault}", "see gpulock doctor"
        ) from fault


def check_systemd_scope(config: "dict[str, list[str]]") -> None:
    """Raise Refusal for a job of Grid Engine that systemd moves out of the cgroup closed here."""
    why = "systemd takes the job out of the cgroup that closes its GPUs (ISOLATION=cgroup)"
    if config.get("enable_systemd") == ["1"]:  # Open Cluster Scheduler
        do = "set ENABLE_SYSTEMD=false in execd_params, or ISOLATION=off"
        raise Refusal(INVALID_REQUEST, why, do)
    if config.get("use_systemd") == ["yes"]:  # Some Grid Engine (daimh/sge)
        raise Refusal(INVALID_REQUEST, why, "take USE_CGROUPS=systemd out of execd_params")


def begin_job_isolation(node: Node, job: IsolatedJob, granted: list[Device]) -> None:
    """Keep a job to what it was granted; raise Refusal, and then it must not start.

    The process from which it will descend is moved where it opens these devices alone.
    """
    settings = node.settings
    try:
        tree.note_cgroup_folders(node.store, [])
        sessions.close_login_cgroups(tree.find_cgroup_top(settings.sys_root))
        major = policy.read_caps_major(settings.proc_root)
        rules = policy.device_rules(granted, major, settings.driver_root)
        folder = job_cgroup_folder(node, job)
        if step := slurm_step_folder(folder):
            close_job_cgroup(os.path.dirname(step), rules)
            os.setxattr(step, STEP_MARK, job.cgroup_name.encode())
        else:
            tree.note_cgroup_folders(node.store, [os.path.dirname(folder)])
            close_job_cgroup(folder, rules)
            tree.move_to_cgroup(job.pid, folder)
        if node.proc.running(job.pid, job.start):
            return
    except ProcessLookupError:
        pass
    except (OSError, ValueError) as fault:
        raise Refusal(
            os_error_kind(fault),
            f"the job cannot be confined to its devices: {fault}",
            "see gpulock doctor",
        ) from fault
    raise Refusal(UNKNOWN, f"process {job.pid} ended meanwhile", "nothing to do")


def job_cgroup_folder(node: Node, job: IsolatedJob) -> str:
    """Return the folder of a job's cgroup, whether it is there and the job in it or not.

    Raises Refusal or ProcessLookupError.
    """
    top = tree.find_cgroup_top(node.settings.sys_root)
    folder = tree.service_cgroup_folder(top, node.proc, job.pid)
    return folder if os.path.basename(folder) == job.cgroup_name else f"{folder}/{job.cgroup_name}"


def slurm_step_folder(folder: str) -> str:
    """Return Slurm's own cgroup of a step, where its daemon's would be `folder`, else nothing.

    In version 2 Slurm moves each task from its daemon's cgroup to another one of the step's
    (docs/facts/slurm.md, cgroups of a job). So the job's own is closed, with all its steps.
    """
    step, daemons = os.path.split(os.path.dirname(folder))
    slurms = daemons == STEP_DAEMONS and os.path.basename(step).startswith(STEP)
    return step if slurms else ""


def close_job_cgroup(folder: str, rules: "Rules") -> None:
    """Let a cgroup, made where it is not there, open no GPU but what the rules name.

    Raises OSError.
    """
    from gpulock.isolation import bpf

    atomic.mkdir_if_missing(folder)
    bpf.attach_device_program(folder, bpf.assemble_device_program(rules))


def confined_pids(node: Node, label: str, keeper: int) -> list[int]:
    """Return the processes in the cgroups of a label, and below them; raise OSError.

    A cgroup whose process still runs is left out, but for that of the job's own, `keeper`.
    """
    pids: set[int] = set()
    for top in list_job_cgroups(node):
        name = os.path.basename(top)
        process = tree.parse_cgroup_name(name)
        if not process or not name.startswith(f"{tree.PREFIX}{label}-"):
            continue
        if process[0] != keeper and node.proc.running(*process):
            continue
        for folder, _, _ in os.walk(top, onerror=raise_unless_cgroup_gone):
            try:
                pids.update(tree.cgroup_pids(folder))
            except OSError as fault:
                raise_unless_cgroup_gone(fault)
    return sorted(pids - {0})  # 0 is of another pid namespace


def raise_unless_cgroup_gone(fault: OSError) -> None:
    """Raise a fault, unless it says that a cgroup is gone, before it was opened or since."""
    if fault.errno not in (errno.ENOENT, errno.ENODEV):
        raise fault


def end_job_isolation(node: Node, prefix: str, job: "IsolatedJob | None" = None) -> str:
    """Take a job's cgroup away, before its devices are released; return what went wrong.

    It also removes those of its tasks or steps here that are over, whose labels begin with
    `prefix`: a task of `qrsh -inherit` has no epilog. Without `job` it removes only these.
    """
    try:
        if job is not None:
            end_confinement(node, job)
        remove_step_cgroups(node, f"{tree.PREFIX}{prefix}")
    except (OSError, ValueError, Refusal) as fault:
        return str(fault)
    return ""


def end_confinement(node: Node, job: IsolatedJob) -> None:
    """Take a job's own cgroup away: called from below its process, which is moved out.

    Processes that the job left behind stay inside, and open no GPU any more. Raises Refusal or
    OSError; the reaper removes what is left.
    """
    folder = job_cgroup_folder(node, job)
    if os.path.isdir(folder):
        for member in ancestor_pids_up_to(node, job.pid):
            try:
                tree.move_to_cgroup(member, os.path.dirname(folder))
            except ProcessLookupError:
                continue  # one that is gone has left
        remove_or_close_cgroup(folder)


def remove_step_cgroups(node: Node, prefix: str) -> None:
    """Take away the cgroups of that name whose process is gone; raise Refusal or OSError.

    They may be far from slurmd: its step daemons have a scope of their own in version 2.
    """
    for folder in list_job_cgroups(node):
        name = os.path.basename(folder)
        process = tree.parse_cgroup_name(name) if name.startswith(prefix) else None
        if process and not node.proc.running(*process):
            remove_or_close_cgroup(folder)


def list_job_cgroups(node: Node) -> list[str]:
    """Return the jobs' cgroups; raise OSError."""
    folders: list[str] = []
    for folder in tree.read_cgroup_folders(node.store):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            continue  # of a service that was stopped: its cgroups went with it
        folders += [f"{folder}/{name}" for name in names if tree.parse_cgroup_name(name)]
    return folders


def remove_or_close_cgroup(folder: str) -> None:
    """Remove a cgroup of a job that is over; who still lives there opens no GPU any more."""
    if not tree.remove_cgroup(folder):
        close_job_cgroup(folder, policy.CLOSE_ALL_GPUS)


def ancestor_pids_up_to(node: Node, last: int) -> list[int]:
    """Return this process and those above it up to `last`, which is moved when they are out."""
    from gpulock.alloc.process_scan import ProcessScan

    above = [*ProcessScan(node.proc).ancestry(os.getpid())]
    return above[: above.index(last) + 1] if last in above else [last]


def clean_up_isolation(node: Node) -> str:
    """Remove what jobs that are over left behind, see to the ways round; return what failed."""
    try:
        remove_ended_cgroups(node)
    except (OSError, Refusal) as fault:
        return f"isolation: {fault}"
    return ""


def remove_ended_cgroups(node: Node) -> None:
    """Remove the cgroups of jobs that are over; raise Refusal or OSError.

    Logins are closed from the first reconcile of a boot on, before there is a job: what somebody
    opens now stays open. That is noted first, or nobody would open them again.
    """
    try:
        top = tree.find_cgroup_top(node.settings.sys_root)
    except Refusal:
        if node.settings.isolation != "off":
            raise
        top = ""
    folders = list_job_cgroups(node)
    left = [folder for folder in folders if not remove_if_job_ended(folder, node)]
    if node.settings.isolation != "off":
        tree.note_cgroup_folders(node.store, [])
        sessions.close_login_cgroups(top)
        return
    launchers = [folder for folder in left if tree.is_launcher_cgroup(folder)]
    sessions.reopen_cgroups([*(sessions.login_cgroups(top) if top else ()), *launchers])
    if not left:
        tree.remove_cgroup_marks(node.store)


def remove_if_job_ended(folder: str, node: Node) -> bool:
    """Remove a cgroup of ours whose process is gone; return whether it is; raise OSError."""
    process = tree.parse_cgroup_name(os.path.basename(folder))
    return process is not None and not node.proc.running(*process) and tree.remove_cgroup(folder)
