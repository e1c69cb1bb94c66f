# SPDX-License-Identifier: Apache-2.0
"""What the hooks of every scheduler share: whose settings, what is told to whom.

Hot.
"""

import os

from gpulock.errors import BROKEN, LINE_BYTES, Refusal, UnexpectedError, shorten
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.system_log import ERROR, INFO, log_to_system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.job_processes import JobMembers
    from gpulock.alloc.liveness import Judge


class NotRootError(Refusal):
    """Refuse because the scheduler did not start the hook as root."""

    def __init__(self, uid: int) -> None:
        super().__init__(BROKEN, f"the hook runs as uid {uid}", "it must be root's")


def read_hook_settings(path: str, to_syslog: bool = True) -> Settings:
    """Load the settings; root, or a simulation's own user, and nobody else, may run a hook."""
    os.umask(0o022)  # everybody may read locks and records, whatever the daemon's umask is
    settings = read_settings(path, keep=True)
    if os.geteuid() != 0 and not settings.simulation:
        raise NotRootError(os.geteuid())
    for fault in settings.faults:  # to the administrator: the job's owner cannot mend it
        line = f"gpulock: {fault}; correct the file"
        log_hook_line(settings, line, error=True, to_job=False, to_syslog=to_syslog)
    return settings


def observer_judge(node: Node, members: "dict[str, JobMembers] | None" = None) -> "Judge":
    """Return a judge without rules, for a release: it looks at processes and judges nobody."""
    from gpulock.alloc.liveness import Judge
    from gpulock.alloc.process_scan import ProcessScan

    return Judge(node.boot_id, ProcessScan(node.proc), {}, members)


def unexpected_refusal(fault: BaseException) -> Refusal:
    """Return the refusal for a fault nobody foresaw, with where it happened.

    It is unknown: one user's jobs break no node. Those of several owners in a row do.
    """
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
    return UnexpectedError(f"{type(fault).__name__}: {fault}{place}")


def log_hook_line(
    settings: "Settings | None",
    sentence: str,
    error: bool,
    to_job: bool = True,
    to_syslog: bool = True,
) -> None:
    """Write one line to syslog and, for an error of the job's, to stderr; none decides anything."""
    if error and to_job:
        import select  # not for a hook that has nothing to tell

        try:  # a job's output may be a pipe that is full: the shepherd kills a hook that waits
            if select.select((), (2,), (), 0)[1]:
                line = shorten(sentence, LINE_BYTES)  # names of processes may be any bytes
                os.write(2, line.encode("utf-8", "backslashreplace") + b"\n")
        except (OSError, ValueError):
            pass
    if to_syslog and (settings is None or not settings.simulation):
        log_to_system(ERROR if error else INFO, sentence)
