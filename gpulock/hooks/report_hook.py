# SPDX-License-Identifier: Apache-2.0
"""Have the report of a job made at its end, as its user: REPORT_AT_END.

Hot, loaded by an epilog only where it is set, after the release. The work is done by
`gpulock report`, in a process that has nothing of root's: a shared file system may not know root,
and may not answer. An alarm that outlives exec ends it; what it does, or fails to do, decides
nothing.
"""

import os
import time
from _signal import SIGKILL, alarm  # the C module: its Python face costs 4 ms

from gpulock.deadline import Deadline
from gpulock.node.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = 10  # for the report: the exporter closes an account within two, or five
POLL_SECONDS = 0.02
NOBODY = 65534  # a group without rights: writes here are allowed by the uid
NOT_STARTED = 127
LABEL = "report"  # of its cgroup
# no HOME: python must not find the user's site-packages, whose code is not ours
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONNOUSERSITE": "1"}
DESCRIPTORS = 1024  # that a hook may have been given


def start_job_report(
    settings: Settings,
    claims: "Mapping[str, int]",
    wait: bool,
    gid: int = NOBODY,
    output: str = "",
) -> None:
    """Start the report of the claims (token: uid) that a job held; raise OSError.

    With `wait`, standard output is the job's, and is not closed before the report is in it.
    Without, nothing of ours is held open, and the report goes to `output`, a path of the job's.
    """
    uids = set(claims.values())
    if len(uids) != 1:
        return  # nothing was held; a job has one owner
    command = ["gpulock", "--config", settings.path, "report"]
    command += ["--tokens", ",".join(sorted(claims))]
    if output:
        command += ["--append", output]
    pid = os.fork()
    if pid == 0:
        exec_job_report(settings, command, uids.pop(), gid, wait)
    if wait:
        wait_for_report(pid, Deadline(SECONDS + 1))


def exec_job_report(
    settings: Settings, command: "list[str]", uid: int, gid: int, wait: bool
) -> None:
    """Become the report; never return. Where it cannot be kept from the GPUs there is none."""
    try:
        os.setsid()  # slurmd kills the process group of an Epilog that is over
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 2) if wait else (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, DESCRIPTORS)  # a pipe of slurmd's that stays open holds up the node
        if settings.isolation == "cgroup":
            close_report_devices(settings)
        if os.geteuid() == 0 and not settings.simulation:
            os.setgroups([])
            os.setgid(gid)
            become_report_user(uid, wait)
        os.chdir("/")
        alarm(SECONDS)
        os.execvpe(command[0], command, ENVIRONMENT)
    finally:
        os._exit(NOT_STARTED)


def close_report_devices(settings: Settings) -> None:
    """Leave the epilog's cgroup, where every GPU opens: our user may take this process over.

    A user may trace their own processes. Raises Refusal; a reconcile removes what is left.
    """
    from gpulock.isolation import job
    from gpulock.node.context import Node

    job.enter_closed_cgroup(Node(settings), LABEL)


def become_report_user(uid: int, wait: bool) -> None:
    """Become the job's user; raise OSError.

    After a Slurm job (`wait` is no) the user cannot trace it: the Epilog, and what it starts, can
    open the devices that ConstrainDevices kept from the job's steps.
    """
    if wait:
        os.setuid(uid)
        return
    from gpulock.hooks import drop_privileges

    drop_privileges.become_untraced_user(uid)


def wait_for_report(pid: int, deadline: Deadline) -> None:
    """Wait for the report, and end it at the deadline: it may hang where no alarm is heard."""
    while deadline.left() > 0:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(POLL_SECONDS)
    os.kill(pid, SIGKILL)
